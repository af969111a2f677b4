"""Real schedulers and workers, found through an API server: endpoints come and go under load, and nothing is lost."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc
from shared.network.rpc import make_channel
from tests.support.clients.token_client import generate_tokens, seeded
from tests.support.kubernetes.endpoint_slices import SERVICE, SLICES, endpoint, make_slice, write_service_account
from tests.support.kubernetes.kube_api import KubeApi, run_kube_api
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import start_service

State = scheduler_pb2.GetStateResponse


class Pods:
    """Worker pods and a scheduler's, as processes on loopback, and the API server that knows them."""

    def __init__(self, api: KubeApi, directory: Path, stack: AsyncExitStack) -> None:
        self.api = api
        self._directory = directory
        self._stack = stack
        self._model_dir = write_tiny_llama(directory / "model")
        self._account = write_service_account(directory / "account")
        self._workers: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
        self.address = f"unix:{directory}/scheduler.sock"
        self.cell_address = f"unix:{directory}/cell.sock"

    def start_scheduler(self) -> None:
        """Start the scheduler."""
        discovery = [
            "--discovery=kubernetes",
            "--max-dp=4",
            f"--discovery-service={SERVICE}",
            "--discovery-port=grpc",
            "--discovery-period-s=2",
            f"--discovery-api-server={self.api.url}",
            f"--discovery-service-account={self._account}",
        ]
        links = [f"--listen={self.address}", f"--cell-listen={self.cell_address}", "--worker-silence-s=6"]
        self._stack.enter_context(start_service("scheduler", *links, *discovery))

    def start_worker(self, name: str) -> None:
        """Start a worker's pod, which is ready."""
        port = free_port()
        model = [f"--model-dir={self._model_dir}", "--ops-backend=reference", "--num-threads=1"]
        flags = [f"--listen=127.0.0.1:{port}", "--kv-cache-num-blocks=4096", "--silence-s=6", *model]
        self._workers[name] = self._stack.enter_context(start_service("worker", *flags)), port
        self.api.store.create(SLICES, make_slice(name, [endpoint("127.0.0.1", ready=True)], port=port))

    async def delete_worker(self, name: str) -> int:
        """Delete a pod as a cluster does: its endpoint terminates, its process is asked to end, and both go.

        Returns:
            The process's exit code.
        """
        process, port = self._workers.pop(name)
        leaving = endpoint("127.0.0.1", ready=False, serving=True, terminating=True)
        self.api.store.replace(SLICES, make_slice(name, [leaving], port=port))
        process.send_signal(signal.SIGTERM)
        exit_code = await asyncio.to_thread(process.wait, PATIENCE_S)
        self.api.store.delete(SLICES, name)
        return exit_code

    def kill_worker(self, name: str) -> None:
        """Kill a pod's process; its endpoint stays as if nothing had happened."""
        self._workers[name][0].kill()


class Client:
    """A direct client, and an operator."""

    def __init__(self, channel: grpc.aio.Channel, cell_channel: grpc.aio.Channel) -> None:
        self._scheduler = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self._operator = scheduler_pb2_grpc.SchedulerServiceStub(cell_channel)

    async def wait_for_ranks(self, count: int) -> State:
        """Wait until this many places have workers, all attached; fails after five minutes."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                state: State = await self._operator.GetState(scheduler_pb2.GetStateRequest(), wait_for_ready=True)
                if len(state.rank_steps) == count and all(rank.is_attached for rank in state.rank_steps):
                    return state

    async def generate(self, number: int) -> tuple[int, ...]:
        """The answer to one of ten requests."""
        request = seeded([1 + number % 10, 2, 3], seed=number % 10, temperature=1.0, max_tokens=24)
        return tuple((await generate_tokens(self._scheduler, request, deadline_s=PATIENCE_S)).token_ids)


@asynccontextmanager
async def running_pods(directory: Path) -> AsyncIterator[tuple[Pods, Client]]:
    """Start a scheduler and two workers."""
    with run_kube_api(free_port()) as api:
        async with AsyncExitStack() as stack:
            pods = Pods(api, directory, stack)
            pods.start_scheduler()
            for name in ("a", "b"):
                pods.start_worker(name)
            channel = await stack.enter_async_context(make_channel(pods.address))
            cell_channel = await stack.enter_async_context(make_channel(pods.cell_address, internal=True))
            client = Client(channel, cell_channel)
            await client.wait_for_ranks(2)
            yield pods, client


@pytest.mark.parametrize(
    "num_streams",
    [pytest.param(24, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.proof)],
)
async def test_nothing_is_lost_while_endpoints_come_and_go(tmp_path: Path, num_streams: int) -> None:
    async with running_pods(tmp_path) as (pods, client):
        expected = [await client.generate(number) for number in range(10)]
        is_over = False
        num_answers = 0

        async def stream(first: int) -> None:
            nonlocal num_answers
            number = first
            while not is_over:
                assert await client.generate(number) == expected[number % 10]
                num_answers += 1
                number += 7

        async with asyncio.TaskGroup() as streams:
            for first in range(num_streams):
                streams.create_task(stream(first))
            pods.start_worker("c")
            await client.wait_for_ranks(3)
            assert await pods.delete_worker("a") == 0
            await client.wait_for_ranks(2)
            # The API server fails while a worker crashes; the others serve on.
            pods.api.faults.status = 500
            pods.api.cut_connections()
            pods.start_worker("d")
            pods.kill_worker("b")
            num_requests = len(pods.api.requests)
            await asyncio.to_thread(pods.api.wait_for_requests, num_requests + 2)
            pods.api.faults.status = None
            pods.api.store.delete(SLICES, "b")
            state = await client.wait_for_ranks(2)
            is_over = True
        assert state.num_lost_epochs == 1
        assert state.num_poison_requests == 0
        assert num_answers >= num_streams
