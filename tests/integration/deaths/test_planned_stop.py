"""A cell that is asked to end finishes its answers: whatever dies meanwhile, and whichever processes get the signal."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import grpc
import pytest

from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.cells.cell import REFERENCE, popen_lockstep, start_cell
from tests.support.cells.planned_stops import (
    Asked,
    ask_all,
    begin_answers,
    contents,
    expect_answers,
    launcher_first,
    launcher_last,
    only_launcher,
    wait_until_draining,
)
from tests.support.clients.client import connect
from tests.support.system.ports import free_port


@pytest.mark.parametrize("asked", [only_launcher, pytest.param(launcher_first, marks=pytest.mark.proof)])
@pytest.mark.parametrize("role", ["worker", "scheduler"])
async def test_a_cell_that_drains_starts_what_dies_and_finishes_its_answers(
    tiny_model: Path, role: str, asked: Asked
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
        assert await asyncio.to_thread(cell.wait) == 1
        log = cell.log()

    assert [reason_of(status_from_rpc_error(end)) for end in ends if isinstance(end, grpc.RpcError)] == ["DRAINING"] * 4
    assert "serve: the drain ends at once: no worker can be ready in time" in log
    last_line = "error: answers in flight were cut: no worker would have been ready in the time left"
    assert log.splitlines()[-1] == last_line


async def test_a_drain_that_is_too_short_for_the_answers_cuts_them_and_says_so(tiny_model: Path) -> None:
    with start_cell(tiny_model, REFERENCE, "--drain-s=0.2") as cell:
        async with connect(cell) as client:
            answers = await begin_answers(cell, client)
            ask_all(launcher_first(cell.launcher.pid))
            ends = await asyncio.gather(*answers, return_exceptions=True)
        cell.send_signal("worker", signal.SIGCONT)
        assert await asyncio.to_thread(cell.wait) == 1
        log = cell.log()

    assert [reason_of(status_from_rpc_error(end)) for end in ends if isinstance(end, grpc.RpcError)] == ["DRAINING"] * 4
    assert "answers in flight were cut: they did not finish in time num_requests=4" in log
    assert log.splitlines()[-1] == "error: answers in flight were cut: 0.2 s were too short"


@pytest.mark.parametrize("order", [launcher_first, pytest.param(launcher_last, marks=pytest.mark.proof)])
async def test_a_cell_whose_processes_are_all_asked_to_end_at_once_finishes_its_answers(
    tiny_model: Path, order: Asked
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
