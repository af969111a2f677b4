"""The batch that a worker keeps between steps, on the host and on the device, and what one step takes from it."""
