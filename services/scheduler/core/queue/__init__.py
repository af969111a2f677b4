"""The waiting sequences."""
