"""Kernels from logits to tokens: edits, draws, log-probabilities."""
