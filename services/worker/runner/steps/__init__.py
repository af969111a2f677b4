"""Steps from their launch to their result."""
