"""What the architectures are made of."""
