"""The scheduler's RPCs, and the asyncio shell around the engine."""
