"""Two schedulers over the same workers: whatever happens to the one that leads, the other one takes over once."""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from shared.network.heartbeat import LEASE_S
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.cells.chaos import Damage, Load, Peace, TellOf
from tests.support.cells.rolling_cell import (
    RollingCell,
    RollingClient,
    SchedulerPaths,
    connect_to_all,
    run_pathed_cell,
    run_rolling_cell,
)
from tests.support.clients.token_client import generate_tokens, seeded
from tests.support.system.patience import PATIENCE_S

pytestmark = pytest.mark.slow

# How long a stopped leader stays stopped: its workers are free after the lease.
STOP_S = LEASE_S + 3
NUM_RANKS = 2
_POLL_S = 0.02


@dataclass(frozen=True)
class Scene:
    """What all tests here need."""

    model_dir: Path
    directory: Path
    peace: Peace
    num_hits: int
    """How often each thing happens: `--chaos-kills`."""
    tell_of: TellOf
    report: Callable[[str], None]


@pytest.fixture
def scene(
    model_dir: Path, tmp_path: Path, peace: Peace, num_kills: int, tell_of: TellOf, report: Callable[[str], None]
) -> Scene:
    return Scene(model_dir, tmp_path, peace, num_kills, tell_of, report)


class Pair:
    """Two schedulers under load, of which the one with the number `leader` holds all workers.

    Attributes:
        takeover_s: How long each take-over took: from the loss of the leader until answers went on.
        num_exits: Schedulers that have exited for a rival.
    """

    def __init__(self, cell: RollingCell, client: RollingClient, load: Load) -> None:
        self.cell = cell
        self.client = client
        self.load = load
        self.leader = 0
        self.takeover_s: list[float] = []
        self.num_exits = 0

    @property
    def standby(self) -> int:
        """The number of the other scheduler."""
        return 1 - self.leader

    async def start_standby(self) -> None:
        """Start a scheduler beside the leader, and check that it is ready, refuses calls, and takes nothing."""
        self.cell.start(f"scheduler {self.standby}")
        state = await self.client.wait_for_state_of(self.standby, lambda _: True)
        assert not state.ready
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await generate_tokens(self.client.schedulers[self.standby], seeded([5], max_tokens=1))
        assert reason_of(status_from_rpc_error(refusal.value)) == "NOT_READY"
        await self.load.settle()

    async def wait_for_takeover(self, lost_at: float) -> None:
        """Wait until the standby leads and answers go on."""
        await self.client.wait_for_state_of(self.standby, lambda state: state.num_running)
        await self.load.wait_for_progress()
        self.takeover_s.append(time.monotonic() - lost_at)
        await self.client.wait_until_leading(self.standby)
        self.leader = self.standby

    async def see_exit(self, number: int) -> None:
        """Wait until a scheduler exits for its rival."""
        assert await self.cell.wait_for_exit(f"scheduler {number}") == 1
        self.num_exits += 1


async def kill(pair: Pair) -> None:
    """The leader is killed."""
    lost_at = time.monotonic()
    await pair.cell.kill(f"scheduler {pair.leader}")
    await pair.wait_for_takeover(lost_at)


async def stop(pair: Pair) -> None:
    """The leader is stopped for longer than the lease. When it is continued, it exits and takes no worker back."""
    stopped, lost_at = pair.leader, time.monotonic()
    pair.cell.send_signal(f"scheduler {stopped}", signal.SIGSTOP)
    taking_over = asyncio.create_task(pair.wait_for_takeover(lost_at))
    await asyncio.sleep(STOP_S)
    if len(pair.takeover_s) % 2:
        # A worker that starts again meanwhile is the new leader's too.
        await taking_over
        await pair.cell.kill("worker 1")
        pair.cell.start("worker 1")
        await pair.client.wait_until_leading(pair.leader)
    pair.cell.send_signal(f"scheduler {stopped}", signal.SIGCONT)
    await pair.see_exit(stopped)
    await taking_over


async def start_both(pair: Pair) -> None:
    """Both schedulers are killed and started at once. If each gets a part of the cell, exactly one of them exits."""
    names = [f"scheduler {number}" for number in (0, 1)]
    await asyncio.gather(*map(pair.cell.kill, names))
    for name in names:
        pair.cell.start(name)
    first_held_at: float | None = None
    async with asyncio.timeout(PATIENCE_S):
        while True:
            states = [await pair.client.state_of(number) for number in (0, 1)]
            held = [sum(rank.is_attached for rank in state.rank_steps) if state else 0 for state in states]
            if any(held) and first_held_at is None:
                first_held_at = time.monotonic()
            # One that has exited stays away until this round is over.
            if sorted(held) == [0, NUM_RANKS] and (None not in states or any(map(pair.cell.has_exited, names))):
                break
            await asyncio.sleep(_POLL_S)
    assert first_held_at is not None
    pair.takeover_s.append(time.monotonic() - first_held_at)
    pair.leader = held.index(NUM_RANKS)
    await pair.load.settle()
    if pair.cell.has_exited(names[pair.standby]):
        await pair.see_exit(pair.standby)
    else:
        await pair.cell.kill(names[pair.standby])


async def crash_workers(pair: Pair) -> None:
    """All workers are killed and start again, so that none names a holder: the leader stays."""
    before = await pair.client.wait_until_leading(pair.leader)
    names = [f"worker {rank}" for rank in range(NUM_RANKS)]
    await asyncio.gather(*map(pair.cell.kill, names))
    for name in names:
        pair.cell.start(name)
    await pair.load.settle()
    after = await pair.client.wait_until_leading(pair.leader)
    assert after.instance_id == before.instance_id
    assert after.num_lost_epochs == before.num_lost_epochs + NUM_RANKS


@asynccontextmanager
async def pair_under_load(cell: RollingCell, scene: Scene) -> AsyncIterator[Pair]:
    """A leader and a standby under load; at the end all answers are checked, and who held the workers."""
    async with connect_to_all(cell) as client:
        load = Load(client, scene.peace)
        pair = Pair(cell, client, load)
        await client.wait_until_leading(0)
        for number in (0, 1):
            await cell.wait_until_serving(f"tokenizer {number}")
        async with load.keep_in_flight():
            await pair.start_standby()
            yield pair
        state = await client.wait_until_idle()
    scene.tell_of(load, len(pair.takeover_s), state)
    if pair.takeover_s:
        times = " ".join(f"{time_s:.2f}" for time_s in sorted(pair.takeover_s))
        median_s = statistics.median(pair.takeover_s)
        scene.report(f"{pair.num_exits} exits for a rival; seconds: median {median_s:.2f}; {times}")
    assert load.damage == Damage()
    assert load.num_answers >= len(scene.peace.requests)
    check_epochs(cell)


def check_epochs(cell: RollingCell) -> None:
    """Check by the workers' own logs that each epoch had one holder, and that no older one came back."""
    for rank in range(NUM_RANKS):
        for log in cell.logs(f"worker {rank}"):
            lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
            epochs = [line["epoch"] for line in lines if line["message"] == "attached"]
            assert epochs == sorted(set(epochs))


@pytest.mark.parametrize(
    "hit",
    [
        pytest.param(kill, id="killed"),
        pytest.param(stop, id="stopped", marks=pytest.mark.proof),
        pytest.param(start_both, id="started with its standby", marks=pytest.mark.proof),
    ],
)
async def test_requests_outlive_a_leader_that_is(scene: Scene, hit: Callable[[Pair], Awaitable[None]]) -> None:
    with run_rolling_cell(scene.model_dir, scene.directory) as cell:
        async with pair_under_load(cell, scene) as pair:
            for _ in range(scene.num_hits):
                await pair.load.wait_until_busy(0)
                await hit(pair)
                await pair.start_standby()
        assert pair.load.num_resumes > 0


async def cut_off(pair: Pair, paths: SchedulerPaths) -> None:
    """The leader loses its network to workers and tokenizers until the other one has taken over."""
    lonely, lost_at = pair.leader, time.monotonic()
    for path in paths.of(lonely):
        path.cut()
    await pair.wait_for_takeover(lost_at)
    # What it sent meanwhile arrives now.
    for path in paths.of(lonely):
        path.heal()
    await pair.see_exit(lonely)


async def test_requests_outlive_a_leader_that_is_cut_off(scene: Scene) -> None:
    async with run_pathed_cell(scene.model_dir, scene.directory) as (cell, paths):
        async with pair_under_load(cell, scene) as pair:
            for _ in range(scene.num_hits):
                await pair.load.wait_until_busy(0)
                await cut_off(pair, paths)
                await pair.start_standby()
        assert pair.load.num_resumes > 0


@pytest.mark.proof
async def test_a_crash_of_all_workers_does_not_move_the_lead(scene: Scene) -> None:
    with run_rolling_cell(scene.model_dir, scene.directory) as cell:
        async with pair_under_load(cell, scene) as pair:
            for _ in range(scene.num_hits):
                await pair.load.wait_until_busy(0)
                await crash_workers(pair)
