"""A forward pass's context and KV cache."""
