"""Anthropic's Messages: reads their requests, and writes their answers."""
