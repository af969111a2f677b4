"""A scheduler that hangs until another one has taken its workers does no harm when it wakes, and exits."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.health import wait_until_serving
from shared.rpc import make_channel
from tests.support.chaos import SCHEDULER_FLAGS, TOKENIZER_FLAGS, WORKER_FLAGS, Damage, Load, Peace, TellOf
from tests.support.client import Client, connect
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port
from tests.support.processes import start_service

pytestmark = pytest.mark.slow

NUM_RANKS = 2


@dataclass
class Addresses:
    """The addresses of a cell."""

    address: str
    scheduler_address: str
    cell_address: str


class PairedCell:
    """Two workers, an active scheduler, a standby scheduler on another address, and a tokenizer."""

    def __init__(self, model_dir: Path, stack: ExitStack) -> None:
        self._model_dir = model_dir
        self._stack = stack
        self._workers = [f"127.0.0.1:{free_port()}" for _ in range(NUM_RANKS)]
        self._schedulers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self._cell_addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self._tokenizer = f"127.0.0.1:{free_port()}"
        self._rank_to_process = {rank: self._start_worker(rank) for rank in range(NUM_RANKS)}
        self.first = self._start_scheduler(0)
        schedulers = f"--scheduler={','.join(self._cell_addresses)}"
        self._start("tokenizer", f"--listen={self._tokenizer}", schedulers, *TOKENIZER_FLAGS)

    def start_second(self) -> None:
        """Start the standby scheduler."""
        self._start_scheduler(1)

    async def wait_until_tokenizer_serves(self) -> None:
        """Wait until the tokenizer is serving; it starts in parallel with the others, and may be the last."""
        async with make_channel(self._tokenizer) as channel:
            await wait_until_serving(channel)

    def replace_worker(self, rank: int) -> None:
        """Kill a worker and start another one in its place."""
        self._rank_to_process[rank].kill()
        self._rank_to_process[rank].wait()
        self._rank_to_process[rank] = self._start_worker(rank)

    @asynccontextmanager
    async def connect(self, scheduler: int) -> AsyncIterator[Client]:
        """Connect a client that uses one of the two schedulers for its state."""
        addresses = Addresses(self._tokenizer, self._schedulers[scheduler], self._cell_addresses[scheduler])
        async with connect(addresses) as client:
            yield client

    def _start_worker(self, rank: int) -> subprocess.Popen[bytes]:
        place = [f"--listen={self._workers[rank]}", f"--dp-rank={rank}", f"--dp-size={NUM_RANKS}"]
        return self._start("worker", *place, "--ops-backend=reference", "--num-threads=1", *WORKER_FLAGS)

    def _start_scheduler(self, number: int) -> subprocess.Popen[bytes]:
        links = [f"--listen={self._schedulers[number]}", f"--cell-listen={self._cell_addresses[number]}"]
        links.append(f"--workers={','.join(self._workers)}")
        service = start_service("scheduler", *links, *SCHEDULER_FLAGS)
        return self._stack.enter_context(service)

    def _start(self, role: str, *flags: str) -> subprocess.Popen[bytes]:
        return self._stack.enter_context(start_service(role, f"--model-dir={self._model_dir}", *flags))


@pytest.mark.parametrize("replaces_a_worker", [False, True], ids=["", "a worker is started again meanwhile"])
async def test_a_scheduler_that_wakes_when_another_one_serves_exits(
    model_dir: Path, peace: Peace, replaces_a_worker: bool, tell_of: TellOf
) -> None:
    with ExitStack() as stack:
        cell = PairedCell(model_dir, stack)
        async with cell.connect(0) as client, cell.connect(1) as successor:
            load = Load(client, peace)
            await load.wait_for_state(lambda state: all(rank.is_attached for rank in state.rank_steps))
            await cell.wait_until_tokenizer_serves()
            cell.start_second()
            async with load.keep_in_flight():
                await load.wait_until_busy(0)
                cell.first.send_signal(signal.SIGSTOP)
                taken_over = Load(successor, peace)
                await taken_over.wait_until_busy(0)
                if replaces_a_worker:
                    # Domains are taken over one by one, and only a domain already held can be lost.
                    await taken_over.wait_until_busy(1)
                    cell.replace_worker(1)
                    await taken_over.wait_for_state(lambda state: state.num_lost_epochs)
                    await taken_over.wait_until_busy(1)
                cell.first.send_signal(signal.SIGCONT)
                exit_code = await asyncio.to_thread(cell.first.wait, PATIENCE_S)
                await load.wait_for_progress()
            state = await successor.wait_until_idle()

    tell_of(load, 1 + state.num_lost_epochs, state)
    assert exit_code == 1
    assert load.damage == Damage()
    assert load.num_resumes > 0
    # It lost no worker to the scheduler that woke up.
    assert state.num_lost_epochs == int(replaces_a_worker)
