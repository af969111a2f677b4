"""A forward pass's attention metadata and KV cache."""
