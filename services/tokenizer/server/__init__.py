"""The RPCs that clients call, and the path of the answers."""
