"""Collectives between the ranks of one model."""
