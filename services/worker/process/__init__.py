"""The worker process: the device loop on its main thread, the RPC thread, and how the process ends."""
