"""A cell that is asked to end finishes its answers: whatever dies meanwhile, and whichever processes get the signal."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import psutil
import pytest

from shared.network.rpc import reason_of, status_from_rpc_error
from tests.support.cells.cell import REFERENCE, Cell, popen_lockstep, start_cell
from tests.support.clients.client import Client, Completion, connect, varied_requests
from tests.support.deploy.unit_file import processes_asked_to_stop, read_service, stop_signal
from tests.support.system.ports import free_port


async def expect_answers(client: Client) -> list[Completion]:
    """The undisturbed answers."""
    return await client.generate_all(varied_requests(4, max_tokens=200))


async def begin_answers(cell: Cell, client: Client) -> list[asyncio.Task[Completion]]:
    """Begin the answers; the worker is stopped in their middle, so that they do not end by themselves."""
    requests = varied_requests(4, max_tokens=200)
    while True:
        answers = [asyncio.create_task(client.generate(request)) for request in requests]
        await client.wait_until(lambda state: state.num_running >= len(requests))
        cell.send_signal("worker", signal.SIGSTOP)
        state = await client.state()
        if state.num_running + state.num_waiting == len(answers):
            return answers
        # Some were faster than this test.
        cell.send_signal("worker", signal.SIGCONT)
        await asyncio.gather(*answers)


def contents(completions: Sequence[Completion]) -> list[tuple[object, ...]]:
    return [(completion.token_ids, completion.text, completion.reason) for completion in completions]


async def wait_until_draining(cell: Cell, answers: Sequence[object]) -> None:
    await asyncio.to_thread(cell.wait_for_log, f"draining num_requests={len(answers)}")


def launcher_first(launcher_pid: int) -> list[psutil.Process]:
    """The processes that systemd asks to end when it stops the unit, in its order."""
    return processes_asked_to_stop(read_service(), psutil.Process(launcher_pid))


def launcher_last(launcher_pid: int) -> list[psutil.Process]:
    return launcher_first(launcher_pid)[::-1]


def ask_all(processes: Sequence[psutil.Process]) -> None:
    number = signal.Signals[stop_signal(read_service())]
    for process in processes:
        process.send_signal(number)


def only_launcher(launcher_pid: int) -> list[psutil.Process]:
    return [psutil.Process(launcher_pid)]


@pytest.mark.parametrize("asked", [only_launcher, pytest.param(launcher_first, marks=pytest.mark.proof)])
@pytest.mark.parametrize("role", ["worker", "scheduler"])
async def test_a_cell_that_drains_starts_what_dies_and_finishes_its_answers(
    tiny_model: Path, role: str, asked: Callable[[int], list[psutil.Process]]
) -> None:
    with start_cell(tiny_model, REFERENCE, "--drain-s=600") as cell:
        async with connect(cell) as client:
            expected = await expect_answers(client)
            answers = await begin_answers(cell, client)
            ask_all(asked(cell.launcher.pid))
            await wait_until_draining(cell, answers)
            pid = cell.kill(role)
            if role != "worker":
                cell.send_signal("worker", signal.SIGCONT)
            completions = await asyncio.gather(*answers)
        assert await asyncio.to_thread(cell.wait) == 0
        log = cell.log()

    assert contents(completions) == contents(expected)
    assert f"exited; restarting role={role} pid={pid} reason=the {role} was killed by SIGKILL" in log


async def test_a_drain_that_is_too_short_for_a_start_of_the_worker_ends_at_once_and_says_so(tiny_model: Path) -> None:
    config = tiny_model / "config.json"
    # A worker's start takes longer than a second.
    with start_cell(tiny_model, REFERENCE, "--drain-s=1") as cell:
        async with connect(cell) as client:
            answers = await begin_answers(cell, client)
            hidden = config.rename(tiny_model / "hidden.json")
            try:
                pid = cell.kill("worker")
                await asyncio.to_thread(cell.wait_for_log, f"exited; restarting role=worker pid={pid}")
                cell.launcher.send_signal(signal.SIGTERM)
                ends = await asyncio.gather(*answers, return_exceptions=True)
            finally:
                hidden.rename(config)
        await asyncio.to_thread(cell.wait)
        log = cell.log()

    assert [reason_of(status_from_rpc_error(end)) for end in ends if isinstance(end, grpc.RpcError)] == ["DRAINING"] * 4
    assert "serve: the drain ends at once: no worker can be ready in time" in log


@pytest.mark.parametrize("order", [launcher_first, pytest.param(launcher_last, marks=pytest.mark.proof)])
async def test_a_cell_whose_processes_are_all_asked_to_end_at_once_finishes_its_answers(
    tiny_model: Path, order: Callable[[int], list[psutil.Process]]
) -> None:
    with start_cell(tiny_model, REFERENCE, "--drain-s=600") as cell:
        async with connect(cell) as client:
            expected = await expect_answers(client)
            answers = await begin_answers(cell, client)
            ask_all(order(cell.launcher.pid))
            cell.send_signal("worker", signal.SIGCONT)
            completions = await asyncio.gather(*answers)
        assert await asyncio.to_thread(cell.wait) == 0
        log = cell.log()

    assert contents(completions) == contents(expected)
    assert "exited; restarting" not in log
    assert not any(line.startswith("error: ") for line in log.splitlines())
    assert "Traceback" not in log


def test_a_cell_whose_processes_are_all_asked_to_end_while_they_start_ends_as_asked(tiny_model: Path) -> None:
    with popen_lockstep("serve", str(tiny_model), f"--listen=127.0.0.1:{free_port()}") as launcher:
        assert launcher.stderr is not None
        while "scheduler: serving" not in (line := launcher.stderr.readline()):
            assert line, "the launcher ended before the scheduler served"
        ask_all(launcher_last(launcher.pid))
        _, log = launcher.communicate()

    assert launcher.returncode == 0
    assert not any(line.startswith("error: ") for line in log.splitlines())
    assert "Traceback" not in log
