"""Checkpoints: formats, and how tensors are found, converted and checked."""
