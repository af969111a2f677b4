"""The trace of a request: what is noted while it is served, and the spans that are exported of it."""
