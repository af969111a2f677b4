"""The workers of one coupled failure domain, started by the test so that it can cut their links to the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from tests.support.system.ports import free_port
from tests.support.system.processes import start_service

_POLL_S = 0.1


class CoupledWorkers:
    """DP ranks with expert parallelism; when one of them exits all are restarted, as by a launcher.

    Attributes:
        ports: Their ports on 127.0.0.1, by DP rank.
        num_starts: How often the domain was started.
    """

    def __init__(self, model_dir: Path, num_ranks: int, *flags: str) -> None:
        """Prepare the workers without starting them; `flags` are further worker flags."""
        self.ports = [free_port() for _ in range(num_ranks)]
        self.num_starts = 0
        self._flags = [f"--model-dir={model_dir}", f"--dp-size={num_ranks}", "--ep", "--num-threads=1", *flags]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the workers running."""
        keeper = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            keeper.cancel()
            await asyncio.wait({keeper})

    async def _keep(self) -> None:
        while True:
            self.num_starts += 1
            with ExitStack() as stack:
                processes = [
                    stack.enter_context(start_service("worker", *self._flags, *self._place(rank)))
                    for rank in range(len(self.ports))
                ]
                while True:
                    await asyncio.sleep(_POLL_S)
                    if any(process.poll() is not None for process in processes):
                        break

    def _place(self, rank: int) -> list[str]:
        leader = [f"--leader=127.0.0.1:{self.ports[0]}"] if rank else []
        return [f"--listen=127.0.0.1:{self.ports[rank]}", f"--dp-rank={rank}", *leader]
