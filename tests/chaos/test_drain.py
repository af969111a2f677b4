"""Every process of a cell is asked to end and replaced, one after the other, under load: a rolling upgrade."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.cells.chaos import Damage, Load, Peace, State, TellOf
from tests.support.cells.rolling_cell import RollingCell, RollingClient, connect_to_all, run_rolling_cell

pytestmark = pytest.mark.slow


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
            await self._replace_worker(number)
            await self._replace_tokenizer(number)
        self.num_resumes = self.load.num_resumes
        for number in (1, 0):
            await self._replace_scheduler(number)

    async def _replace_worker(self, rank: int) -> None:
        await self.load.wait_until_busy(rank)
        await self._replace(f"worker {rank}")
        await self.load.settle()

    async def _replace_tokenizer(self, number: int) -> None:
        await self.load.wait_for_progress()
        await self._replace(f"tokenizer {number}")
        await self.cell.wait_until_serving(f"tokenizer {number}")

    async def _replace_scheduler(self, number: int) -> None:
        await self.load.wait_until_busy(0)
        self.states.append(await self.client.state())
        await self._replace(f"scheduler {number}")
        await self.client.wait_for_state_of(number, lambda _: True)
        await self.load.settle()

    async def _replace(self, name: str) -> None:
        assert await self.cell.drain(name) == 0
        self.cell.start(name)


@asynccontextmanager
async def start_loaded_cell(
    model_dir: Path, directory: Path, peace: Peace, *, drain_s: float
) -> AsyncIterator[LoadedCell]:
    """Start a cell with all its processes, and keep its requests in flight."""
    with run_rolling_cell(model_dir, directory, drain_s=drain_s) as cell:
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


@pytest.mark.parametrize("drain_s", [30.0, 0.3], ids=["answers finish", "answers move"])
async def test_a_rolling_upgrade_of_every_process_is_not_noticed(
    model_dir: Path,
    peace: Peace,
    tmp_path_factory: pytest.TempPathFactory,
    drain_s: float,
    tell_of: TellOf,
    num_kills: int,
) -> None:
    is_short = num_kills <= 5
    if drain_s > 1 and is_short:
        pytest.skip("takes a minute, and needs no other code than the other case: `make chaos` runs it")
    # Cells share nothing, so a short run has one.
    num_cells = 1 if is_short else 2
    directories = [tmp_path_factory.mktemp("cell") for _ in range(num_cells)]
    async with AsyncExitStack() as stack:
        cells = []
        for number in range(num_cells):
            part = Peace(peace.requests[number::num_cells], peace.answers[number::num_cells])
            starting = start_loaded_cell(model_dir, directories[number], part, drain_s=drain_s)
            cells.append(await stack.enter_async_context(starting))
        for loaded in cells:
            await loaded.replace_all()

    for loaded in cells:
        tell_of(loaded.load, 6, loaded.states[-1])
        assert loaded.load.damage == Damage()
        assert loaded.load.num_answers >= len(peace.requests) // num_cells
        # Only a short drain interrupts answers.
        assert (loaded.num_resumes > 0) is (drain_s < 1)
        for state in loaded.states:
            assert (state.num_lost_epochs, state.num_suspects, state.num_poison_requests) == (0, 0, 0)
