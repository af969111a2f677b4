"""The bound on waiting for workers, as a direct client and a replica meet it."""

from __future__ import annotations

from pathlib import Path

import grpc

from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.clients.token_client import error_of, seeded
from tests.support.scheduler.gated_worker import GatedWorker
from tests.support.scheduler.scheduler_shell import running_cell


async def test_an_answer_that_has_begun_and_a_new_one_end_with_workers_lost(tmp_path: Path) -> None:
    worker = GatedWorker(is_open=True)
    async with running_cell(tmp_path, worker, worker_silence_s=1.0, workers_lost_s=0.5) as cell:
        await cell.wait_until_ready()
        begun = cell.scheduler.Generate(seeded([1, 5], max_tokens=400))
        await begun.read()
        worker.gate.clear()
        worker.is_silent = True
        for call in (begun, cell.scheduler.Generate(seeded([2, 5]))):
            error = await error_of(call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert reason_of(status_from_rpc_error(error)) == "WORKERS_LOST"
        worker.gate.set()
        worker.is_silent = False
        await cell.wait_until_ready()
        assert (await cell.state()).num_waiting == 0
