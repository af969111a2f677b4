"""The real engine with a real model runner as its only worker, in one process: messages are encoded and decoded."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from services.scheduler.cell.events import Action
from services.scheduler.core.batch.step import Step
from services.worker.runner.model_runner import ModelRunner
from shared.step.codec import encode_result, encode_step, parse_result, parse_step
from shared.step.step import StepResult
from tests.support.scheduler.engine_driver import EngineDriver


class RunnerWorker:
    """An epoch of a runner; see `WorkerModel`. The runner derives its rows by itself."""

    last_rows: dict[int, int] = {}  # noqa: RUF012 - never written

    def __init__(self, runner: ModelRunner) -> None:
        """`runner` has begun the epoch."""
        self._runner = runner

    def run(self, step: Step) -> StepResult:
        """Run a step of the scheduler."""
        result = self._runner.run_step(parse_step(encode_step(step)))
        return parse_result(encode_result(result))


class RunnerDriver(EngineDriver):
    """An engine whose worker is `runner`: attaching it, at first and after a loss, begins an epoch there."""

    def __init__(self, runner: ModelRunner, **settings: Any) -> None:
        """`settings` as in `EngineDriver`; the runner has at least as many blocks and checkpoints."""
        self._runner = runner
        super().__init__(**settings)

    @override
    def attach(self, domain: int = 0, **changes: object) -> list[Action]:
        return super().attach(domain, **{"logits_width": self._runner.facts.logits_width, **changes})

    @override
    def _make_worker(self) -> RunnerWorker:  # type: ignore[override]
        limits = self.limits
        num_blocks = self._runner.attach(
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
        assert num_blocks >= limits.num_blocks
        assert self._runner.room.num_checkpoints >= (limits.num_checkpoints or 0)
        return RunnerWorker(self._runner)
