"""Spare workers as the launcher keeps them: light processes take the place of those that import torch."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from collections.abc import AsyncIterator

import psutil
import pytest

from services.cli.processes import spare_workers
from services.cli.processes.service_command import ServiceCommand
from services.cli.processes.spare_workers import SpareWorkers
from services.cli.processes.supervisor import FIRST_DELAY_S
from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import running_children

pytestmark = pytest.mark.process

MODULE = "tests.support.system.waiting_process"
WORKER = ServiceCommand("worker", ("--listen=unix:/w", "--tp-rank=1"), "unix:/w", domain="worker 0")
SCHEDULER = ServiceCommand("scheduler", (), "unix:/s", domain="scheduler")
DELAY_S, MAX_DELAY_S = FIRST_DELAY_S, 4.0


@pytest.fixture
async def spares() -> AsyncIterator[SpareWorkers]:
    spares = SpareWorkers(2, MAX_DELAY_S, module=MODULE)
    yield spares
    await spares.end()
    assert not found()


def found() -> list[psutil.Process]:
    """The spares that run, and what they have become."""
    return [child for child, command in running_children().items() if MODULE in command]


async def wait_until_waiting(spares: SpareWorkers, count: int, caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while caplog.text.count("a spare worker waits") < count:
            await spares.refill(0.0)
            await asyncio.sleep(0.01)


def kill_one(number: int = signal.SIGKILL) -> int:
    """Its process id."""
    process = found()[0]
    process.send_signal(number)
    return int(process.pid)


async def wait_for_report(spares: SpareWorkers, pid: int, now: float, caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not any(record.__dict__.get("exit_code") and record.__dict__["pid"] == pid for record in caplog.records):
            await spares.refill(now)
            await asyncio.sleep(0.01)


async def said_by(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        return await process.stdout.read()


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "still importing"])
async def test_a_spare_becomes_the_worker_that_is_started_and_another_role_gets_none(
    spares: SpareWorkers, caplog: pytest.LogCaptureFixture, *, waits: bool
) -> None:
    caplog.set_level(logging.INFO)
    await spares.refill(0.0)
    if waits:
        await wait_until_waiting(spares, 2, caplog)
    assert await spares.take(SCHEDULER) is None
    processes = [await spares.take(WORKER) for _ in range(3)]
    assert processes[2] is None
    for process in processes[:2]:
        assert process is not None
        assert await said_by(process) == f"a service with {list(WORKER.flags)}\n".encode()
        assert await process.wait() == 0


async def test_there_is_none_before_the_first_refill_and_none_after_the_end(spares: SpareWorkers) -> None:
    assert await spares.take(WORKER) is None
    await spares.refill(0.0)
    assert len(found()) == 2
    await spares.end()
    assert not found()
    await spares.refill(9.0)
    assert await spares.take(WORKER) is None


async def test_no_spares_are_kept_unless_they_are_asked_for() -> None:
    spares = SpareWorkers(0, MAX_DELAY_S, module=MODULE)
    await spares.refill(0.0)
    assert await spares.take(WORKER) is None
    assert not found()


async def test_one_that_ends_is_replaced_after_a_delay_that_doubles_up_to_the_limit(
    spares: SpareWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    await spares.refill(now)
    for delay_s in (DELAY_S, 2 * DELAY_S, 4 * DELAY_S, MAX_DELAY_S, MAX_DELAY_S):
        pid = kill_one()
        await wait_for_report(spares, pid, now, caplog)
        await spares.refill(now + delay_s - 0.01)
        assert len(found()) == 1
        now += delay_s
        await spares.refill(now)
        assert len(found()) == 2


async def test_one_that_was_taken_or_lived_for_long_makes_the_next_delay_short(
    spares: SpareWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    await spares.refill(0.0)
    for now in (0.0, 100.0):
        pid = kill_one()
        await wait_for_report(spares, pid, now, caplog)
        await spares.refill(now + DELAY_S)
        assert len(found()) == 2
    process = await spares.take(WORKER)
    assert process is not None
    await process.wait()
    pid = kill_one()
    await wait_for_report(spares, pid, 101.0, caplog)
    await spares.refill(101.0 + DELAY_S)
    assert len(found()) == 2


@pytest.mark.parametrize(
    ("number", "level"), [(signal.SIGKILL, logging.WARNING), (signal.SIGTERM, logging.INFO)], ids=["killed", "asked"]
)
async def test_what_ends_a_spare_is_logged_once(
    spares: SpareWorkers, caplog: pytest.LogCaptureFixture, number: int, level: int
) -> None:
    caplog.set_level(logging.INFO)
    await wait_until_waiting(spares, 2, caplog)
    pid = kill_one(number)
    await wait_for_report(spares, pid, 0.0, caplog)
    await spares.refill(0.0)
    [record] = [record for record in caplog.records if record.message == "a spare worker exited; restarting"]
    assert (record.levelno, record.__dict__["exit_code"]) == (level, -number)


async def test_a_machine_that_cannot_start_one_is_asked_again_later(
    spares: SpareWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        await spares.refill(0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    await spares.refill(DELAY_S - 0.01)
    assert not found()
    await spares.refill(DELAY_S)
    assert len(found()) == 2
    assert caplog.text.count("a spare worker cannot be started") == 1


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
async def test_one_that_does_not_answer_is_no_worker_and_is_gone(
    spares: SpareWorkers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(spare_workers, "_ANSWER_S", 0.1)
    await wait_until_waiting(spares, 2, caplog)
    for process in found():
        process.send_signal(number)
    assert await spares.take(WORKER) is None
    assert not found()


async def test_flags_that_the_socket_does_not_hold_are_no_spares_matter(spares: SpareWorkers) -> None:
    await spares.refill(0.0)
    long = ServiceCommand("worker", ("--model-dir=" + "m" * (1 << 22),), "unix:/w", domain="worker 0")
    assert await spares.take(long) is None
    assert not found()
