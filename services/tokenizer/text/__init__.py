"""Converts text to tokens and back."""
