"""Finds the workers of a cell whose endpoints come and go; its settings say which workers these are."""
