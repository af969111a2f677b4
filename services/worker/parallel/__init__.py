"""Collectives between the ranks that serve one model."""
