"""Conversations, and the model's chat template, which renders them as text."""
