"""The worker's process: the device loop on its main thread, the RPC thread, and how it ends."""
