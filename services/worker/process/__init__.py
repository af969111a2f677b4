"""The worker process: its two threads, and how it ends."""
