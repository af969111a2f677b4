"""A worker that lives and cannot compute is replaced, and no request is blamed for it."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import psutil
import pytest

from tests.support.cells.cell import REFERENCE, start_cell
from tests.support.clients.client import connect, token_request


@pytest.mark.slow
async def test_a_worker_without_memory_is_replaced_and_answers_nobody_with_poison(tiny_model: Path) -> None:
    requests = [token_request([3 + number, *range(5, 300)], max_tokens=16, ignore_eos=True) for number in range(6)]
    with start_cell(tiny_model, REFERENCE) as cell:
        async with connect(cell) as client:
            expected = await asyncio.gather(*map(client.generate, requests))
            # Nothing is cached that a process which has computed the prompts would not have to compute again.
            worker = psutil.Process(cell.kill("worker"))
            await asyncio.to_thread(cell.wait_for_log, f"exited; restarting role=worker pid={worker.pid}")
            await cell.wait_until_serving("worker", instead_of=worker.pid)
            worker = cell.find_processes()["worker"]
            size = worker.memory_info().vms
            worker.rlimit(resource.RLIMIT_AS, (size + 2**16, size + 2**16))
            answers = await asyncio.gather(*map(client.generate, requests))
        log = cell.log()

    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert f"exited; restarting role=worker pid={worker.pid}" in log
