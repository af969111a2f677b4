"""One rank that runs steps without a scheduler: `python -m tests.support.ranks.step_process`.

Each line of its standard input is a `StepJob`, each line of its output the `StepAnswer`. Any error ends the process, so
that its peers notice.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.internal.v1 import worker_pb2
from services.worker.config import WorkerSettings
from services.worker.runner.start.build import build_model_runner
from shared.step.codec import encode_result, parse_step
from tests.support.ranks.meeting import meet_at


@dataclass(frozen=True)
class StepJob:
    """A model to load, and the steps of one epoch to run."""

    settings: dict[str, Any]
    """Arguments of `WorkerSettings`."""
    steps: list[str]
    """Serialized `StepRequest`s, in hex."""
    store: str
    """HOST:PORT where the ranks connect."""
    start_id: str

    def to_line(self) -> str:
        """Encode as one line."""
        return json.dumps(asdict(self)) + "\n"


@dataclass(frozen=True)
class StepAnswer:
    """The results of a job."""

    results: list[str]
    """Serialized `StepResult`s without their times, in hex."""
    fingerprint: str
    progress: int

    @classmethod
    def from_line(cls, line: str) -> StepAnswer:
        """Decode from one line."""
        return cls(**json.loads(line))


def run_job(job: StepJob) -> StepAnswer:
    """Load the model and run the steps."""
    settings = WorkerSettings(**job.settings)
    layout = settings.layout
    meeting = None if layout.is_alone else meet_at(job.store, job.start_id, is_first=not layout.follows)
    runner = build_model_runner(settings, lambda _: None, meeting)
    runner.attach(block_size=16, max_num_seqs=8, max_num_batched_tokens=1024)
    results = [_run_step(runner, bytes.fromhex(step)).hex() for step in job.steps]
    return StepAnswer(results, runner.numerics_fingerprint, runner.progress)


def _run_step(runner: Any, request: bytes) -> bytes:
    result = encode_result(runner.run_step(parse_step(worker_pb2.StepRequest.FromString(request))))
    result.ClearField("device_time_us")
    return result.SerializeToString(deterministic=True)


def main() -> None:
    """Run all jobs."""
    for line in sys.stdin:
        print(json.dumps(asdict(run_job(StepJob(**json.loads(line))))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
    # Exit as workers do: connections end with the process.
    os._exit(0)
