"""A cell with spare workers: one takes a dead worker's place, and whatever dies, nothing is left or waits for it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.cells.cell import REFERENCE, Cell, start_cell
from tests.support.clients.client import connect, varied_requests
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model
from tests.support.system.patience import PATIENCE_S

FAMILY = "Qwen3MoeForCausalLM"
WAITS, TAKEN = "a spare worker waits", "was_spare=True"


def wait_until_waiting(cell: Cell, count: int) -> list[psutil.Process]:
    """The spares, once so many in all have said that they wait."""
    while cell.log().count(WAITS) < count:
        cell.wait_for_log(WAITS)
    return cell.find_spares()


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, PATIENCE_S)
    assert not alive


async def test_a_spare_takes_a_killed_workers_place_and_answers_as_it_did(tiny_model: Path, tmp_path: Path) -> None:
    requests = varied_requests(2, max_tokens=200)
    packed = ("--worker.ops-backend=native", "--worker.packed-cache", f"--worker.packed-dir={tmp_path / 'packed'}")
    with start_cell(tiny_model, "--spare-workers=1", *packed) as cell:
        [spare] = wait_until_waiting(cell, 1)
        # It has no port, and nothing of the model.
        assert not spare.net_connections("inet")
        assert not [file for file in spare.open_files() if str(tiny_model) in file.path]
        async with connect(cell) as client:
            # One by one: what `native` computes beside others may be rounded otherwise.
            before = [await client.generate(request) for request in requests]
            answers = [asyncio.create_task(client.generate(request)) for request in requests]
            await client.wait_until(lambda state: state.num_running >= len(requests))
            old = cell.kill("worker")
            resumed = await asyncio.gather(*answers)
            await cell.wait_until_serving("worker", instead_of=old)
            after = [await client.generate(request) for request in requests]
        processes = cell.find_processes()
        assert processes["worker"].pid == spare.pid
        # The next one ends with the cell while it imports, if it has been started.
        spares = cell.find_spares()
        assert cell.stop() == 0
        wait_until_gone([*processes.values(), *spares])
        log = cell.log()

    assert [answer.token_ids for answer in after] == [answer.token_ids for answer in before]
    assert [len(answer.token_ids) for answer in resumed] == [len(answer.token_ids) for answer in before]
    assert "Traceback" not in log
    assert "\nworker    | " in log


@pytest.mark.slow
async def test_a_killed_spare_is_replaced_and_a_cell_ends_while_one_takes_a_workers_place(tiny_model: Path) -> None:
    with start_cell(tiny_model, REFERENCE, "--spare-workers=1") as cell:
        [spare] = wait_until_waiting(cell, 1)
        spare.kill()
        [newer] = wait_until_waiting(cell, 2)
        old = cell.kill("worker")
        cell.wait_for_log(f"exited; restarting role=worker pid={old}")
        processes = [*cell.find_processes().values(), newer]
        assert cell.stop() == 0
        wait_until_gone(processes)
        log = cell.log()

    assert log.count("a spare worker exited; restarting") == 1
    assert "Traceback" not in log


@pytest.mark.slow
async def test_a_spare_takes_the_place_of_any_rank_of_a_coupled_domain_that_starts_again(
    tmp_path: Path,
) -> None:
    write_small_model(build_model(FAMILY, dict(next(iter(SMALL_CONFIGS[FAMILY].values())))), tmp_path)
    requests = varied_requests(3, max_tokens=100)
    with start_cell(tmp_path, REFERENCE, "--dp=2", "--ep", "--spare-workers=1") as cell:
        wait_until_waiting(cell, 1)
        async with connect(cell) as client:
            before = await client.generate_all(requests)
            pids = {name: process.pid for name, process in cell.find_processes().items() if name != "tokenizer"}
            cell.kill("worker 1.0")
            for name in ("worker 0.0", "worker 1.0"):
                await cell.wait_until_serving(name, instead_of=pids[name])
            after = await client.generate_all(requests)
        [spare] = wait_until_waiting(cell, 2)
        processes = [*cell.find_processes().values(), spare]
        cell.launcher.kill()
        wait_until_gone(processes)
        log = cell.log()

    assert [answer.token_ids for answer in after] == [answer.token_ids for answer in before]
    assert log.count(TAKEN) == 1
    assert log.count("started role=worker") == 4


@pytest.mark.slow
async def test_a_stopped_spare_keeps_no_worker_waiting(tiny_model: Path) -> None:
    with start_cell(tiny_model, REFERENCE, "--spare-workers=1") as cell:
        [spare] = wait_until_waiting(cell, 1)
        spare.send_signal(signal.SIGSTOP)
        old = cell.kill("worker")
        await cell.wait_until_serving("worker", instead_of=old)
        wait_until_gone([spare])
        assert TAKEN not in cell.log()
