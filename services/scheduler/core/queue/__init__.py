"""The waiting sequences, and the order in which they are admitted."""
