"""The worker process: its device loop, its RPC thread, and how it ends."""
