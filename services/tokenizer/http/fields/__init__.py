"""Reads the bodies of requests: their fields, and what these mean to the service."""
