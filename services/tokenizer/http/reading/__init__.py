"""Reads large bodies in processes of their own: one of many small values would hold the interpreter for a second."""
