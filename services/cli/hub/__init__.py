"""Models from a hub, by name."""
