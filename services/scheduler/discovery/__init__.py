"""Finds the workers of a cell whose endpoints come and go."""
