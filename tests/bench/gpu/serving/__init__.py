"""Cells under load, beside transformers and beside the same runner in process."""
