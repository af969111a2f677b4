"""Reads the fields of a request's body that the APIs share, and what these mean to the service."""
