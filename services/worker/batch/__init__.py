"""One step in host arrays."""
