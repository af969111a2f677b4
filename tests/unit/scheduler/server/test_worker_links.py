"""Workers that come and go, over real gRPC: their links are made and ended, and no request is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.scheduler.cell.events import Endpoint
from services.scheduler.server.worker_links import WorkerAccess
from shared.errors import InvalidRequestError
from shared.rpc import make_server
from tests.support.cell_model import expected_completion
from tests.support.patience import PATIENCE_S
from tests.support.scheduler_shell import Cell, running_cell
from tests.support.token_client import generate_tokens, seeded
from tests.support.worker_peer import WorkerPeer


@dataclass
class Script:
    """A discovery that finds what the test says."""

    found: asyncio.Queue[tuple[Endpoint, ...]] = field(default_factory=asyncio.Queue)

    async def run(self, on_found: Callable[[tuple[Endpoint, ...]], None]) -> None:
        """See `Discovery`."""
        while True:
            on_found(await self.found.get())

    def find(self, *endpoints: Endpoint) -> None:
        """Let these be all endpoints."""
        self.found.put_nowait(endpoints)
