"""Processes that fork others, so that what a client sent can cost only its own request."""
