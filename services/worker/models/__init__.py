"""The model architectures, and how one is selected and loaded."""
