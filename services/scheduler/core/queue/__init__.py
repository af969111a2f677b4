"""The sequences that wait, and the order in which they are taken."""
