"""Conversations, and the model's template that turns them into text."""
