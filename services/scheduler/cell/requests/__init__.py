"""The cell's requests, from their submission to their end."""
