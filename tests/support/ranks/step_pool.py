"""Rank processes that run given steps, kept from one model to the next."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.worker.layout import RankLayout
from shared.step.step import Step
from tests.support.ranks.step_process import StepAnswer, StepJob
from tests.support.system.ports import free_port
from tests.support.system.processes import LineProcesses
from tests.support.worker.worker_steps import to_request


class StepPool:
    """Ranks that load any model and run given steps."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._processes = LineProcesses("tests.support.ranks.step_process", environment)
        self._start_ids = itertools.count()

    def run(
        self, model_dir: Path, layouts: Sequence[RankLayout], steps: Sequence[Sequence[Step]], *, backend: str
    ) -> list[StepAnswer]:
        """Run steps on the ranks of one failure domain, and return their answers.

        Args:
            steps: The steps of each DP rank, in order; all ranks of its TP group run them.
        """
        common = {
            "model_dir": str(model_dir),
            "ops_backend": backend,
            "num_threads": 1,
            "kv_cache_num_blocks": 64,
        }
        store, start_id = f"127.0.0.1:{free_port()}", f"start {next(self._start_ids)}"
        jobs = [
            StepJob(
                {
                    **common,
                    "dp_rank": layout.dp_rank,
                    "dp_size": layout.dp_size,
                    "tp_rank": layout.tp_rank,
                    "tp_size": layout.tp_size,
                    "ep": layout.has_expert_parallel,
                    # Never called: there are no RPCs here.
                    "leader": "127.0.0.1:1" if layout.follows else None,
                },
                [to_request(step).SerializeToString().hex() for step in steps[layout.dp_rank]],
                store,
                start_id,
            )
            for layout in layouts
        ]
        return [StepAnswer.from_line(line) for line in self._processes.ask([job.to_line() for job in jobs])]

    def close(self) -> None:
        """Kill the processes."""
        self._processes.close()
