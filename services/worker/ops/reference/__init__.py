"""The `reference` backend: every row alone and in a fixed order."""
