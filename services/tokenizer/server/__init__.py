"""The RPCs that clients call."""
