"""A service's process as the launcher sees it."""

from __future__ import annotations

import asyncio
import sys

import pytest

from services.cli.processes.service_command import ServiceCommand
from services.cli.processes.service_process import ServiceProcess
from tests.support.system.patience import PATIENCE_S

pytestmark = pytest.mark.process

COMMAND = ServiceCommand("worker", (), "unix:/nowhere", domain="worker")


async def test_killing_a_process_that_has_just_ended_is_harmless() -> None:
    lines: list[bytes] = []
    process = await asyncio.create_subprocess_exec(
        "echo", "done", stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    service = ServiceProcess(COMMAND, process, lines.append)
    await process.wait()
    service.kill("it was too late")
    await service.wait()
    assert service.problem == "the worker was killed: it was too late"


async def test_a_service_that_drains_is_asked_until_it_ends_when_that_is_urgent() -> None:
    # It takes the second signal for the first, as services do for a moment.
    drains = "import signal; all_ = {signal.SIGTERM}; signal.pthread_sigmask(signal.SIG_BLOCK, all_)\n"
    drains += "for word in ('ready', 'draining', 'same'): print(word, flush=True); signal.sigwait(all_)"
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", drains, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    service = ServiceProcess(COMMAND, process, lines.put_nowait)
    assert await lines.get() == b"ready"
    is_urgent = asyncio.Event()
    stopping = asyncio.create_task(service.stop(PATIENCE_S, is_urgent))
    assert await lines.get() == b"draining"
    assert not stopping.done()
    is_urgent.set()
    await stopping
    assert service.problem is None


@pytest.mark.parametrize(("end", "problem"), [("exit(0)", None), ("exit(3)", "the worker exited with code 3")])
async def test_a_service_that_ended_before_it_could_be_asked_is_a_problem_only_if_it_failed(
    end: str, problem: str | None
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", end, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    service = ServiceProcess(COMMAND, process, lambda _: None)
    await process.wait()
    await service.stop(PATIENCE_S, asyncio.Event())
    assert service.problem == problem
