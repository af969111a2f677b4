"""The worker service: one process per device, running one shard of the model."""
