"""A worker that comes back reads packed weights from a file, and answers as before."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.cells.cell import Cell, start_cell
from tests.support.clients.client import connect, token_request

REQUESTS = [token_request([3 + number, 9, 40], max_tokens=20, ignore_eos=True) for number in range(3)]
KEPT, READ = "packed weights are kept in a file", "packed weights are read from a file"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--tp=2",)])
async def test_a_cell_answers_alike_before_and_after_its_worker_is_killed(
    tiny_model: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    kept = ("--worker.packed-cache", f"--worker.packed-dir={tmp_path / 'cache'}", "--worker.ops-backend=native")
    num_ranks = 2 if flags else 1
    with start_cell(tiny_model, *kept, *flags) as cell:
        assert cell.log().count(KEPT) == num_ranks
        assert READ not in cell.log()
        async with connect(cell) as client:
            before = [(await client.generate(request)).token_ids for request in REQUESTS]
            name = next(each for each in cell.find_processes() if each.startswith("worker"))
            process_id = cell.kill(name)
            await cell.wait_until_serving(name, instead_of=process_id)
            after = [(await client.generate(request)).token_ids for request in REQUESTS]
        assert cell.log().count(READ) == num_ranks
    assert after == before
    assert len(list((tmp_path / "cache").iterdir())) == num_ranks


@pytest.mark.slow
def test_cells_that_start_at_once_leave_one_file_and_answer_alike(tiny_model: Path, tmp_path: Path) -> None:
    kept = ("--worker.packed-cache", f"--worker.packed-dir={tmp_path / 'cache'}", "--worker.ops-backend=native")

    async def ask(cell: Cell) -> list[list[int]]:
        async with connect(cell) as client:
            return [(await client.generate(request)).token_ids for request in REQUESTS]

    def start_and_ask(_: int) -> tuple[list[list[int]], str]:
        with start_cell(tiny_model, *kept) as cell:
            return asyncio.run(ask(cell)), cell.log()

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(start_and_ask, range(2)))
    last, log = start_and_ask(2)
    assert [answers for answers, _ in both] == [last, last]
    assert all(KEPT in log or READ in log for _, log in both)
    assert READ in log
    assert len(list((tmp_path / "cache").iterdir())) == 1
