"""A service's process as the launcher sees it."""

from __future__ import annotations

import asyncio

import pytest

from shared.cli.cell_plan import ServiceCommand
from shared.cli.service_process import ServiceProcess

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
