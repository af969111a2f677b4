"""Writes answers: as one JSON object, or as the pieces of a stream."""
