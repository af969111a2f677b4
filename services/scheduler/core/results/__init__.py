"""What a step's result means: tokens and ends for clients, and mistakes of a worker that reach none."""
