"""What a forward pass needs besides its tokens: attention metadata and the KV cache."""
