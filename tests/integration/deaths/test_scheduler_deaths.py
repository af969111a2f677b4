"""Schedulers that die one after the other, of causes outside: streams go on, and no request is blamed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.v1 import tokenizer_pb2
from tests.support.cells.cell import REFERENCE, Cell, start_cell
from tests.support.clients.client import Client, Completion, connect, read_answer, varied_requests
from tests.support.system.patience import PATIENCE_S

pytestmark = pytest.mark.slow

NUM_DEATHS = 8
NUM_FAILED_STARTS = 7
_POLL_S = 0.02
_LINK = re.compile(r"linked to the scheduler .*num_resubmitted=(\d+)")


async def begin_all(
    client: Client, requests: Sequence[tokenizer_pb2.GenerateRequest]
) -> list[asyncio.Task[Completion]]:
    """Start calls and wait until each has its first token; returns the tasks that read the answers."""
    begun = [asyncio.Event() for _ in requests]

    async def read(request: tokenizer_pb2.GenerateRequest, has_begun: asyncio.Event) -> Completion:
        async def responses() -> Any:
            async for response in client.tokenizer.Generate(request):
                if response.token_ids:
                    has_begun.set()
                yield response

        [completion] = (await read_answer(responses())).choices.values()
        return completion

    answers = [asyncio.create_task(read(*pair)) for pair in zip(requests, begun, strict=True)]
    await asyncio.gather(*(event.wait() for event in begun))
    return answers


def assert_same(completions: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Check that tokens, text and finish are the same."""
    for completion, other in zip(completions, expected, strict=True):
        assert (completion.token_ids, completion.text) == (other.token_ids, other.text)
        assert completion.reason == other.reason


def links(cell: Cell) -> list[int]:
    """How many requests each link of the tokenizer to a scheduler has begun with."""
    return [int(count) for count in _LINK.findall(cell.log())]


async def wait_for_link(cell: Cell, number: int) -> int:
    """Wait until the tokenizer is linked for the `number`-th time; returns how many requests it submits again."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            counts = links(cell)
            if len(counts) >= number:
                return counts[number - 1]
            await asyncio.sleep(_POLL_S)


async def wait_until_submitted(cell: Cell, num_requests: int) -> None:
    """Wait until a scheduler has `num_requests` requests that have not ended."""
    async with connect(cell) as client:
        await client.wait_until(lambda state: state.num_waiting + state.num_running >= num_requests)


async def wait_for_next(cell: Cell, pid: int) -> psutil.Process:
    """Wait until the scheduler with this process id has been replaced; returns the next one, which is just starting."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            process = cell.find_processes().get("scheduler")
            if process is not None and process.pid != pid:
                return process
            await asyncio.sleep(_POLL_S)


async def test_streams_outlive_schedulers_that_die_right_after_they_are_ready(tiny_model: Path) -> None:
    requests = varied_requests(3, max_tokens=400)
    with start_cell(tiny_model, REFERENCE, "--max-restart-delay-s=1") as cell:
        worker = cell.role_to_process["worker"]
        async with connect(cell) as client:
            undisturbed = await client.generate_all(requests)
            answers = await begin_all(client, requests)
            num_deaths = num_dead_controls = 0
            is_control = False
            # They die before the requests that were just submitted have a token. So after a few deaths one request is
            # accused, and the next scheduler dies without requests.
            while num_deaths < NUM_DEATHS or not num_dead_controls:
                worker.suspend()
                cell.kill("scheduler")
                worker.resume()
                num_deaths += 1
                num_dead_controls += is_control
                num_submitted = await wait_for_link(cell, num_deaths + 1)
                worker.suspend()
                is_control = not num_submitted
                await wait_until_submitted(cell, num_submitted)
            worker.resume()
            completions = await asyncio.gather(*answers)
            after = await client.wait_until_idle()
    assert_same(completions, undisturbed)
    assert after.num_used_blocks == 0


async def test_streams_outlive_schedulers_that_die_before_they_are_ready(tiny_model: Path) -> None:
    requests = varied_requests(3, max_tokens=400)
    with start_cell(tiny_model, REFERENCE) as cell:
        async with connect(cell) as client:
            undisturbed = await client.generate_all(requests)
            answers = await begin_all(client, requests)
            pid = cell.kill("scheduler")
            for _ in range(NUM_FAILED_STARTS):
                scheduler = await wait_for_next(cell, pid)
                pid = scheduler.pid
                scheduler.kill()
            completions = await asyncio.gather(*answers)
        # No scheduler was linked in between.
        assert len(links(cell)) == 2
    assert_same(completions, undisturbed)
