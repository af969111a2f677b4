"""The batch that the worker holds between steps, and the step that is run for it."""
