"""The engine of one cell, without I/O."""
