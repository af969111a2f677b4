"""Checkpoints: which formats are read, how tensors are found, converted and checked."""
