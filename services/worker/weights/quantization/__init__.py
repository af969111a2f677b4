"""Quantized weights: which formats are known, and how they become plain tensors."""
