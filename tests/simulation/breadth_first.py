"""A breadth-first search through all states of a model."""
