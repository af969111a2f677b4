"""The streams to the workers."""
