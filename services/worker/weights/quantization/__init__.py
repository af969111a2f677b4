"""Quantized weights: formats, and their conversion to plain tensors."""
