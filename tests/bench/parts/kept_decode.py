"""A decode step whose weights were read from their packed file, beside one whose weights were packed at the start."""

from __future__ import annotations

import time
from pathlib import Path

from services.worker.config import WorkerSettings
from services.worker.runner.model_runner import ModelRunner
from services.worker.runner.start.build import build_model_runner
from tests.bench.parts.report import Row, compare
from tests.support.worker.worker_steps import decode_step, make_enter, prefill_step

_TARGET = 1.01
_STEPS_PER_TURN = 8
_TURNS = 12
_BLOCK_SIZE = 16
_PROMPT = range(1, 9)


def kept_row(model_dir: Path, packed_dir: Path) -> Row:
    """The least processor time of a step of one sequence, in turns; `packed_dir` has the model's file in int8."""
    kept, packed = (_start(model_dir, packed_dir, is_kept=is_kept) for is_kept in (True, False))
    costs: dict[ModelRunner, list[float]] = {kept: [], packed: []}
    for turn in range(_TURNS):
        for runner in (kept, packed)[:: -1 if turn % 2 else 1]:
            started = time.process_time()
            for _ in range(_STEPS_PER_TURN):
                runner.run_step(decode_step())
            costs[runner].append((time.process_time() - started) / _STEPS_PER_TURN * 1e3)
    title = "decode step of weights from their packed file, beside weights packed at the start"
    return compare(title, min(costs[kept]), "CPU ms", reference=min(costs[packed]), at_most=_TARGET)


def _start(model_dir: Path, packed_dir: Path, *, is_kept: bool) -> ModelRunner:
    """A runner with one sequence, whose decodes are recorded."""
    settings = WorkerSettings(
        model_dir=model_dir,
        quantization="int8",
        kv_cache_memory_gib=0.25,
        packed_cache=is_kept,
        packed_dir=packed_dir,
    )
    runner = build_model_runner(settings, lambda _: None)
    num_tokens = len(_PROMPT) + _STEPS_PER_TURN * (_TURNS + 1)
    blocks = range(-(-num_tokens // _BLOCK_SIZE))
    runner.attach(block_size=_BLOCK_SIZE, max_num_seqs=1, max_num_batched_tokens=len(_PROMPT))
    runner.run_step(prefill_step(make_enter(0, _PROMPT, blocks, max_num_tokens=num_tokens)))
    for _ in range(_STEPS_PER_TURN):
        runner.run_step(decode_step())
    return runner
