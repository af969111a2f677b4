"""The batch, and the runner that computes its steps."""
