"""The start of a runner: what the machine and the model let it choose, and its making."""
