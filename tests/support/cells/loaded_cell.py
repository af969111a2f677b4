"""A rolling cell whose requests are kept in flight while its processes are replaced."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.cells.chaos import Load, Peace, State
from tests.support.cells.rolling_cell import RollingCell, RollingClient, connect_to_all, run_rolling_cell
from tests.support.system.processes import ROOT


@dataclass
class LoadedCell:
    """A cell with clients of its own.

    Attributes:
        states: The last state of each scheduler that held the workers.
        num_resumes: Resumes until all workers and tokenizers were replaced.
    """

    cell: RollingCell
    client: RollingClient
    load: Load
    states: list[State] = field(default_factory=list)
    num_resumes: int = 0

    async def replace_all(self) -> None:
        """Replace every process, and the scheduler that holds the workers last."""
        for number in (0, 1):
            await self.replace_worker(number)
            await self.replace_tokenizer(number)
        self.num_resumes = self.load.num_resumes
        for number in (1, 0):
            await self.replace_scheduler(number)

    async def upgrade(self, root: Path) -> None:
        """Replace every process by one of the release in `root`, in the order of `deploy/README.md`."""
        for rank in (0, 1):
            await self.replace_worker(rank, root)
        self.num_resumes = self.load.num_resumes
        # The one that holds the workers is the last.
        for number in (1, 0):
            await self.replace_scheduler(number, root)
        for number in (0, 1):
            await self.replace_tokenizer(number, root)

    async def replace_worker(self, rank: int, root: Path | None = None) -> None:
        """Replace a worker that computes; `root` is as in `RollingCell.start`."""
        await self.load.wait_until_busy(rank)
        await self._replace(f"worker {rank}", root)
        await self.load.settle()

    async def replace_tokenizer(self, number: int, root: Path | None = None) -> None:
        """Replace a tokenizer, and wait until it serves."""
        await self.load.wait_for_progress()
        await self._replace(f"tokenizer {number}", root)
        await self.cell.wait_until_serving(f"tokenizer {number}")

    async def replace_scheduler(self, number: int, root: Path | None = None) -> None:
        """Replace a scheduler, and wait until the cell makes progress."""
        await self.load.wait_until_busy(0)
        self.states.append(await self.client.state())
        await self._replace(f"scheduler {number}", root)
        await self.client.wait_for_state_of(number, lambda _: True)
        await self.load.settle()

    async def _replace(self, name: str, root: Path | None) -> None:
        assert await self.cell.drain(name) == 0
        self.cell.start(name, root=root)


@asynccontextmanager
async def start_loaded_cell(
    model_dir: Path, directory: Path, peace: Peace, *, drain_s: float, root: Path = ROOT
) -> AsyncIterator[LoadedCell]:
    """Start a cell with all its processes, from the modules in `root`, and keep its requests in flight."""
    with run_rolling_cell(model_dir, directory, drain_s=drain_s, root=root) as cell:
        async with connect_to_all(cell) as client:
            loaded = LoadedCell(cell, client, Load(client, peace))
            await client.wait_until_leading(0)
            cell.start("scheduler 1")
            await client.wait_for_state_of(1, lambda _: True)
            for number in (0, 1):
                await cell.wait_until_serving(f"tokenizer {number}")
            async with loaded.load.keep_in_flight():
                yield loaded
            loaded.states.append(await client.wait_until_idle())
