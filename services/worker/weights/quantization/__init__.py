"""Quantized weights: the supported formats, and how they are converted to plain tensors."""
