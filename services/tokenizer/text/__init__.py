"""Between text and tokens, both ways."""
