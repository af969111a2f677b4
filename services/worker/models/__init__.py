"""The model architectures, and how one is chosen and filled with weights."""
