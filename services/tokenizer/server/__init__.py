"""The RPCs that clients call, and the answers on their way out."""
