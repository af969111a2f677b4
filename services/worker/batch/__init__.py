"""One step's rows in host arrays, and the checks that it passes before."""
