"""One step in host arrays, and the checks on what enters the batch."""
