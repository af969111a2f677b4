"""The streams to the workers, and the epochs under which they serve."""
