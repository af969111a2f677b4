"""One reply parser for each family of models."""
