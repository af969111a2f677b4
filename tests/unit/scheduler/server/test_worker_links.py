"""Workers that Kubernetes names, over real gRPC: their links come and go, and no request is lost.

The API server is a fake one, watched by a real process; what routers of other projects got wrong is among the tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.internal.v1 import worker_pb2
from lockstep.v1 import scheduler_pb2
from shared.network.rpc import make_server
from tests.support.clients.token_client import PROMPT, generate_tokens, seeded
from tests.support.kubernetes.endpoint_slices import SERVICE, SLICES, endpoint, make_slice, write_service_account
from tests.support.kubernetes.kube_api import KubeApi, run_kube_api
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.gated_worker import GatedWorker
from tests.support.scheduler.scheduler_shell import Cell, running_scheduler
from tests.support.scheduler.worker_peer import WorkerPeer
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import running_children

pytestmark = pytest.mark.process


@dataclass
class Cluster:
    """A scheduler, the API server that it watches, and pods with a worker in each."""

    api: KubeApi
    cell: Cell
    discovery: dict[str, Any]
    stack: AsyncExitStack
    ports: dict[str, int] = field(default_factory=dict)
    zones: dict[str, str | None] = field(default_factory=dict)

    async def start(self, name: str, worker: WorkerPeer | None = None, *, zone: str | None = None) -> WorkerPeer:
        """Start a pod, whose endpoint is ready."""
        worker = worker or WorkerPeer()
        worker.response.layout.CopyFrom(worker_pb2.RankLayout(dp_size=1, tp_size=1))
        port = self.ports[name] = free_port()
        server = make_server(f"127.0.0.1:{port}", [worker], internal=True)
        await server.start()
        self.stack.push_async_callback(server.stop, 0)
        self.zones[name] = zone
        self.api.store.create(SLICES, self._slice(name, ready=True))
        return worker

    def set_conditions(self, name: str, **conditions: bool) -> None:
        """Change what the endpoint's slice says."""
        self.api.store.replace(SLICES, self._slice(name, **conditions))

    def delete(self, name: str) -> None:
        """Remove the endpoint; its worker lives on."""
        self.api.store.delete(SLICES, name)

    async def wait_for_ranks(self, *ranks: int) -> None:
        """Wait until just these places have workers, all attached."""
        await self.cell.wait_until(
            lambda state: (
                [rank.dp_rank for rank in state.rank_steps if rank.is_attached]
                == [rank.dp_rank for rank in state.rank_steps]
                == list(ranks)
            )
        )

    async def check_serves(self) -> None:
        """A request gets its answer."""
        completion = await generate_tokens(self.cell.scheduler, seeded(PROMPT, max_tokens=6), deadline_s=PATIENCE_S)
        assert completion.token_ids == expected_completion(PROMPT, 0, 6)

    def _slice(self, name: str, **conditions: bool) -> dict[str, object]:
        one = endpoint("127.0.0.1", **conditions) | {"zone": self.zones[name]}
        return make_slice(name, [one], port=self.ports[name])


@asynccontextmanager
async def running_cluster(
    tmp_path: Path, *, max_dp: int = 3, period_s: float = 30.0, zone: str | None = None
) -> AsyncIterator[Cluster]:
    """Run a scheduler that watches an API server, without workers."""
    discovery: dict[str, Any] = {
        "discovery": "kubernetes",
        "max_dp": max_dp,
        "discovery_service": SERVICE,
        "discovery_port": "grpc",
        "discovery_period_s": period_s,
        "discovery_zone": zone,
        "discovery_service_account": write_service_account(tmp_path / "account"),
    }
    with run_kube_api(free_port()) as api:
        discovery["discovery_api_server"] = api.url
        async with AsyncExitStack() as stack, running_scheduler(tmp_path, [], **discovery) as cell:
            yield Cluster(api, cell, discovery, stack)


async def test_workers_are_attached_as_they_come_and_their_places_are_used_again(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        await cluster.start("a")
        await cluster.wait_for_ranks(0)
        await cluster.check_serves()
        await cluster.start("b")
        await cluster.wait_for_ranks(0, 1)
        cluster.delete("a")
        await cluster.wait_for_ranks(1)
        await cluster.check_serves()
        await cluster.start("c")
        await cluster.wait_for_ranks(0, 1)
        state = await cluster.cell.state()
        assert (state.num_lost_epochs, state.num_suspects) == (0, 0)


async def test_a_worker_of_the_preferred_zone_gets_the_next_place(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, max_dp=1, zone="b") as cluster:
        await cluster.start("first", zone="a")
        await cluster.wait_for_ranks(0)
        others = [await cluster.start(name, zone=zone) for name, zone in (("x", "a"), ("y", "b"), ("z", "a"))]
        cluster.delete("first")
        await cluster.cell.wait_until(lambda _: any(worker.attaches for worker in others))
        await cluster.wait_for_ranks(0)
        assert [bool(worker.attaches) for worker in others] == [False, True, False]
        await cluster.check_serves()


async def test_a_terminating_worker_finishes_what_it_has_and_gets_no_more(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        worker = await cluster.start("a", GatedWorker(is_open=True))
        assert isinstance(worker, GatedWorker)
        await cluster.wait_for_ranks(0)
        worker.gate.clear()
        request = asyncio.create_task(generate_tokens(cluster.cell.scheduler, seeded(PROMPT, max_tokens=6)))
        await cluster.cell.wait_until(lambda state: state.num_running)
        other = await cluster.start("b")
        cluster.set_conditions("a", ready=False, serving=True, terminating=True)
        await cluster.cell.wait_until(lambda state: [rank.is_draining for rank in state.rank_steps] == [True, False])
        await cluster.check_serves()
        assert other.requests
        worker.gate.set()
        assert (await request).token_ids == expected_completion(PROMPT, 0, 6)
        # It is released, and keeps its place until its endpoint is gone.
        await cluster.cell.wait_until(lambda state: [rank.is_attached for rank in state.rank_steps] == [False, True])
        cluster.delete("a")
        await cluster.wait_for_ranks(1)


@pytest.mark.slow
async def test_an_endpoint_that_is_not_ready_serves_on_while_its_stream_lives(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, period_s=1.0) as cluster:
        await cluster.start("a")
        await cluster.wait_for_ranks(0)
        num_requests = len(cluster.api.requests)
        cluster.set_conditions("a", ready=False)
        # Once it has been told so twice at least.
        await wait_for_requests(cluster.api, num_requests + 4)
        await cluster.check_serves()


@pytest.mark.slow
async def test_the_last_set_serves_on_while_the_api_server_is_down(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, period_s=1.0) as cluster:
        await cluster.start("a")
        await cluster.wait_for_ranks(0)
        cluster.api.faults.status = 500
        cluster.api.cut_connections()
        cluster.delete("a")
        await wait_for_requests(cluster.api, len(cluster.api.requests) + 2)
        await cluster.check_serves()
        await cluster.wait_for_ranks(0)
        # What was missed meanwhile is made up for.
        cluster.api.faults.status = None
        await cluster.wait_for_ranks()


@pytest.mark.slow
async def test_the_watching_process_is_started_again_and_nothing_changes_meanwhile(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        await cluster.start("a")
        await cluster.wait_for_ranks(0)
        num_requests = len(cluster.api.requests)
        find_watching_process().kill()
        await wait_for_requests(cluster.api, num_requests + 1)
        await cluster.check_serves()
        await cluster.start("b")
        await cluster.wait_for_ranks(0, 1)


async def test_a_dead_worker_gets_nothing_although_its_slice_says_that_it_is_ready(tmp_path: Path) -> None:
    # production-stack #656: requests went to such addresses for days.
    async with running_cluster(tmp_path) as cluster:
        dead = await cluster.start("a")
        dead.lose_link_at = 1
        await cluster.wait_for_ranks(0)
        await cluster.start("b")
        await cluster.wait_for_ranks(0, 1)
        cluster.api.store.create(SLICES, make_slice("zombie", [endpoint("127.0.0.1", ready=True)], port=free_port()))
        await cluster.cell.wait_until(lambda state: len(state.rank_steps) == 3)
        await asyncio.gather(*(cluster.check_serves() for _ in range(8)))
        state = await cluster.cell.state()
        assert [rank.dp_rank for rank in state.rank_steps] == [0, 1, 2]
        assert not state.rank_steps[2].is_attached


@pytest.mark.slow
async def test_an_evicted_pod_without_an_address_does_no_harm(tmp_path: Path) -> None:
    # production-stack #1008: the watch failed on it and reported nothing more.
    async with running_cluster(tmp_path) as cluster:
        cluster.api.store.create(SLICES, make_slice("evicted", [endpoint(None, ready=False)]))
        await cluster.start("a")
        await cluster.wait_for_ranks(0)


@pytest.mark.slow
async def test_a_worker_that_names_a_rank_is_refused_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with running_cluster(tmp_path) as cluster:
        worker = await cluster.start("a")
        worker.place(0, 2, is_coupled=False)
        await cluster.cell.wait_until(lambda _: len(worker.attaches) >= 2)
        assert "expected GroupPlace(dp_rank=None" in str([vars(record) for record in caplog.records])
        assert not (await cluster.cell.state()).ready


@pytest.mark.slow
async def test_an_empty_place_cannot_be_drained(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        call = cluster.cell.admin.Drain(scheduler_pb2.DrainRequest(dp_rank=2))
        with pytest.raises(Exception, match="no endpoint has this place"):
            await call


async def wait_for_requests(api: KubeApi, count: int) -> None:
    """See `KubeApi.wait_for_requests`."""
    await asyncio.to_thread(api.wait_for_requests, count)


def find_watching_process() -> psutil.Process:
    """The scheduler's only child."""
    watch = "services.scheduler.discovery.slice_watch"
    [child] = [child for child, command in running_children().items() if watch in command]
    return child


@pytest.mark.slow
async def test_a_standby_takes_no_worker_that_came_later_and_all_when_the_leader_is_gone(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        await cluster.start("a")
        await cluster.wait_for_ranks(0)
        directory = tmp_path / "standby"
        directory.mkdir()
        async with running_scheduler(directory, [], instance_id="standby", **cluster.discovery) as standby:
            # Both hear of a new worker at about the same time.
            worker = await cluster.start("b")
            await cluster.wait_for_ranks(0, 1)
            await standby.wait_until(lambda state: len(state.rank_steps) == 2)
            num_refused = worker.num_refused
            await standby.wait_until(lambda _: worker.num_refused >= num_refused + 2)
            assert not (await standby.state()).ready
            assert {attach.scheduler_instance_id for attach in worker.attaches} == {"instance"}
            cluster.cell.links.cancel()
            await standby.wait_until(lambda state: [rank.is_attached for rank in state.rank_steps] == [True, True])
