"""What a forward pass knows besides its tokens: attention metadata and the KV cache."""
