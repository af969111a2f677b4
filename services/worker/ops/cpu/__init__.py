"""The `cpu` backend: batched torch kernels."""
