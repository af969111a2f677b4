"""Attention over the paged cache, and what its kernels share."""
