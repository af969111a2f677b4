"""The batch that the worker keeps between steps, and the runner that computes its steps."""
