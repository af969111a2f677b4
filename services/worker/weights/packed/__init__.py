"""Packed weights in files that outlive the process, so that the next one does not read, quantise and pack again."""
