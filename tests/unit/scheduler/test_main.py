"""The service as a separate process: what it refuses at start, and how it ends."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lockstep.internal.v1 import exchange_pb2_grpc
from lockstep.v1 import scheduler_pb2_grpc
from services.scheduler.server.failpoint import EXIT_CODE
from shared.network.heartbeat import LEASE_S
from shared.network.rpc import make_channel, make_server
from tests.support.clients.token_client import error_of, generate_tokens, reason, seeded
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.worker_peer import WorkerPeer
from tests.support.system.patience import PATIENCE_S
from tests.support.system.pipes import full_pipe
from tests.support.system.processes import module_command, module_environment, python_command
from tests.support.system.serving import wait_until_serving

pytestmark = pytest.mark.process

ENVIRONMENT = module_environment()


def run_service(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run the service to its end."""
    command = module_command("services.scheduler", *flags)
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.parametrize("flag", ["--listen", "--cell-listen", "--manage-listen"])
def test_a_taken_address_is_named_and_prevents_the_start(flag: str, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        free = [f"--listen=unix:{tmp_path}/scheduler", f"--cell-listen=unix:{tmp_path}/cell"]
        result = run_service(*free, f"{flag}={address}")
    assert result.returncode == 1
    last_line = result.stderr.splitlines()[-1]
    assert f"{address}: Address already in use" in last_line
    assert flag != "--manage-listen" or flag in last_line
    assert "Traceback" not in result.stderr


def test_a_management_address_that_is_invalid_is_named() -> None:
    result = run_service("--manage-listen=nowhere")
    assert result.returncode == 2
    assert "error: --manage-listen (or LOCKSTEP_SCHEDULER_MANAGE_LISTEN): " in result.stderr


# The service with a lease so short that a rival soon outlasts it.
WITH_SHORT_LEASE = """
import sys
from services.scheduler import __main__
from services.scheduler.cell.domains import attach

attach.LEASE_S = 0.1
sys.exit(__main__.main())
"""

# The service with a bug: any submission makes its engine raise.
WITH_BUG = """
import sys
from services.scheduler import __main__
from services.scheduler.cell.requests import request_manager

def fail(*_):
    raise ValueError("planted")

request_manager.RequestManager.on_message = fail
sys.exit(__main__.main())
"""


@asynccontextmanager
async def running_service(
    tmp_path: Path, worker: WorkerPeer, *flags: str, program: Sequence[str] = ("-m", "services.scheduler")
) -> AsyncIterator[tuple[asyncio.subprocess.Process, grpc.aio.Channel]]:
    """The service, once it is serving with `worker`, and a channel to it."""
    worker_server = make_server(f"unix:{tmp_path}/worker", [worker], internal=True)
    await worker_server.start()
    address = f"unix:{tmp_path}/scheduler"
    links = [f"--listen={address}", f"--cell-listen=unix:{tmp_path}/cell", f"--workers=unix:{tmp_path}/worker"]
    command = python_command(*program, *links)
    process = await asyncio.create_subprocess_exec(*command, *flags, env=ENVIRONMENT, stderr=asyncio.subprocess.PIPE)
    try:
        async with make_channel(address) as channel:
            await wait_until_serving(channel)
            yield process, channel
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        await worker_server.stop(0)


async def test_a_service_whose_log_is_not_read_still_answers_and_stops(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/scheduler"
    with full_pipe() as (_, stderr):
        links = [f"--listen={address}", f"--cell-listen=unix:{tmp_path}/cell", f"--workers=unix:{tmp_path}/none"]
        command = module_command("services.scheduler", *links)
        process = await asyncio.create_subprocess_exec(*command, env=ENVIRONMENT, stderr=stderr)
        async with make_channel(address, internal=True) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            assert await check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60)
        process.terminate()
        assert await process.wait() == 0


async def test_a_superseded_scheduler_logs_it_and_fails(tmp_path: Path) -> None:
    worker = WorkerPeer()
    async with running_service(tmp_path, worker, program=("-c", WITH_SHORT_LEASE)) as (process, _):
        worker.ledger.offer(9, "successor", time.monotonic() + LEASE_S + 1)
        # The successor counts as live for the whole test.
        worker.ledger.on_heartbeat(1000, 9, "successor", time.monotonic() + PATIENCE_S)
        _, log = await process.communicate()
    assert process.returncode == 1
    assert "the scheduler exits" in log.decode()
    assert "scheduler successor holds the workers" in log.decode()


async def test_the_failpoint_kills_a_scheduler_that_receives_a_prompt_with_its_token(tmp_path: Path) -> None:
    async with running_service(tmp_path, WorkerPeer(), "--fail-on-token=77") as (process, channel):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        harmless = await generate_tokens(stub, seeded([7, 7], max_tokens=2))
        assert harmless.token_ids == expected_completion([7, 7], 0, 2)
        error = await error_of(stub.Generate(seeded([1, 77, 2])))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert await process.wait() == EXIT_CODE


async def test_a_bug_ends_the_process_without_a_reason_so_that_replicas_suspect_a_request(
    tmp_path: Path,
) -> None:
    async with (
        running_service(tmp_path, WorkerPeer(), program=("-c", WITH_BUG)) as (process, channel),
        make_channel(f"unix:{tmp_path}/cell", internal=True) as cell_channel,
    ):
        replica = exchange_pb2_grpc.ExchangeServiceStub(cell_channel).Exchange()
        await replica.read()
        error = await error_of(scheduler_pb2_grpc.SchedulerServiceStub(channel).Generate(seeded([1])))
        assert (error.code(), reason(error)) == (grpc.StatusCode.UNAVAILABLE, "SCHEDULER_LOST")
        assert reason(await error_of(replica)) is None
        _, log = await process.communicate()
    assert process.returncode == 1
    assert "ValueError: planted" in log.decode()
