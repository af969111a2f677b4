"""The RPCs that a scheduler calls, and which scheduler may call them."""
