"""The RPCs that tokenizers and users call, and the asyncio shell around the engine."""
