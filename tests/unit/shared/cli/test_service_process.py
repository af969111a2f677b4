"""A service's process as the launcher holds it."""

from __future__ import annotations

import asyncio

import pytest

from shared.cli.cell_plan import ServiceCommand
from shared.cli.service_process import ServiceProcess

pytestmark = pytest.mark.process

COMMAND = ServiceCommand("worker", (), "unix:/nowhere", domain="worker")


async def test_who_has_just_ended_can_be_killed() -> None:
    lines: list[bytes] = []
    process = await asyncio.create_subprocess_exec(
        "echo", "done", stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    service = ServiceProcess(COMMAND, process, lines.append)
    await process.wait()
    service.kill("it was too late")
    await service.wait()
    assert service.problem == "the worker was killed: it was too late"
