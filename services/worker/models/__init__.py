"""The model architectures."""
