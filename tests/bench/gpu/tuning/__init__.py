"""Finds which of a few configurations of a kernel is the fastest."""
