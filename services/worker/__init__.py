"""The worker service: one process per GPU, which runs a shard of the model."""
