"""Turns a public message into tokens and resolved parameters."""
