"""Cells that are asked to end while they answer: by a signal to the launcher, or to more of their processes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence

import psutil

from tests.support.cells.cell import Cell
from tests.support.clients.client import Client, Completion, varied_requests
from tests.support.deploy.unit_file import processes_asked_to_stop, read_service, stop_signal

Asked = Callable[[int], list[psutil.Process]]
"""Which processes of a cell are asked to end, in order, by the process id of its launcher."""


async def expect_answers(client: Client) -> list[Completion]:
    """The undisturbed answers."""
    return await client.generate_all(varied_requests(4, max_tokens=200))


async def begin_answers(cell: Cell, client: Client, worker: str = "worker") -> list[asyncio.Task[Completion]]:
    """Begin the answers; a worker is stopped in their middle, so that they do not end by themselves."""
    requests = varied_requests(4, max_tokens=200)
    while True:
        answers = [asyncio.create_task(client.generate(request)) for request in requests]
        await client.wait_until(lambda state: state.num_running >= len(requests))
        cell.send_signal(worker, signal.SIGSTOP)
        state = await client.state()
        if state.num_running + state.num_waiting == len(answers):
            return answers
        # Some were faster than this test.
        cell.send_signal(worker, signal.SIGCONT)
        await asyncio.gather(*answers)


def contents(completions: Sequence[Completion]) -> list[tuple[object, ...]]:
    """What must not depend on a fault."""
    return [(completion.token_ids, completion.text, completion.reason) for completion in completions]


async def wait_until_draining(cell: Cell, answers: Sequence[object]) -> None:
    """Wait until the tokenizer lets its answers finish."""
    await asyncio.to_thread(cell.wait_for_log, f"draining num_requests={len(answers)}")


def launcher_first(launcher_pid: int) -> list[psutil.Process]:
    """The processes that systemd asks to end when it stops the unit, in its order."""
    return processes_asked_to_stop(read_service(), psutil.Process(launcher_pid))


def launcher_last(launcher_pid: int) -> list[psutil.Process]:
    """The same in the reverse order."""
    return launcher_first(launcher_pid)[::-1]


def ask_all(processes: Sequence[psutil.Process]) -> None:
    """Ask all of these to end that still run."""
    number = signal.Signals[stop_signal(read_service())]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def only_launcher(launcher_pid: int) -> list[psutil.Process]:
    """The process that Ctrl-C reaches."""
    return [psutil.Process(launcher_pid)]


def only_services(launcher_pid: int) -> list[psutil.Process]:
    """The processes that the launcher has started."""
    return launcher_first(launcher_pid)[1:]
