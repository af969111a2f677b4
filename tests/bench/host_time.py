"""What the host does in a decode step, besides computing: a model runner whose kernels compute nothing.

    python -m tests.bench.host_time --json host_time.json

The kernels return empty tensors, so what is left is the batch, the layers' Python, and sampling. A GPU would wait for
the host where that takes longer than its own work. "its device idle" is the time outside of its work where the host is
the device. "sent ahead" is the time without work of a device that takes as long for its work as these kernels do, and
that the host is ahead of by a step, as in a cell: nothing for plain steps. With drafts the host plans a step once the
tokens before it are drawn, while such a device computes what the proposer needs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from services.worker.drafts.draft_model import DraftModelProposer
from services.worker.drafts.drafter import Drafting
from services.worker.drafts.ngram_drafts import NgramProposer
from services.worker.forward.forward_context import AttentionMetadata, AttentionPlan
from services.worker.forward.kv_cache import KvCache
from services.worker.models.loader import LoadedModel, LoadOptions, load_model
from services.worker.ops import Activation, AttentionParams, EmbeddingKernel, LinearKernel, RopeRows
from services.worker.ops.cpu.backend import CpuOps
from services.worker.ops.matrices import Matrix
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.model_runner import Execution, ModelRunner
from services.worker.runner.stream import EnqueuedWork, HostStream
from tests.bench.gpu.configs import CONFIGS
from tests.bench.gpu.runners import BLOCK_SIZE
from tests.bench.parts.report import Row, compare, limit, print_table, write_json
from tests.support.worker.worker_steps import decode_step, make_enter, prefill_step

BASE_ROWS = 8
MOST_ROWS = 512
# A step of this many rows may take this many times as long as one of `BASE_ROWS`.
MOST_RATIO = 1.5
MOST_MS_OF_ONE_ROW = 1.0
NUM_PROMPT_TOKENS = 8
NUM_DRAFT_TOKENS = 4
NUM_DRAFT_LAYERS = 2
# Their tokens must fit into the memory.
MOST_DRAFTED_ROWS = 32


class NullOps(CpuOps):
    """Kernels that compute nothing. Every token is token 0."""

    name = "null"

    def prepare_linear(self, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> LinearKernel:
        width = weight.shape[0]
        return lambda x: torch.empty((x.shape[0], width), dtype=dtype)

    def prepare_embedding(self, weight: Matrix, dtype: torch.dtype) -> EmbeddingKernel:
        width = weight.shape[1]
        return lambda token_ids: torch.empty((len(token_ids), width), dtype=dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.empty_like(x)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x

    def act_and_mul(self, x: Tensor, activation: Activation) -> Tensor:
        return torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype)

    def select_rope(self, tables: RopeRows, positions: Tensor) -> RopeRows:
        return tables

    def plan_attention(self, metadata: AttentionMetadata, kv_cache: KvCache) -> AttentionPlan:  # type: ignore[override]
        return AttentionPlan(metadata)

    def norm_rope_write(self, *_: Any, **__: Any) -> None:
        pass

    def prefill_attention(self, query: Tensor, *_: Any) -> Tensor:
        return torch.empty((query.shape[0], query.shape[1] * query.shape[2]), dtype=query.dtype)

    def decode_attention(
        self, query: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan, params: AttentionParams
    ) -> Tensor:
        return self.prefill_attention(query)

    def greedy_sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits))


class TimedStream(HostStream):
    """A device that is idle whenever it has no work."""

    def __init__(self) -> None:
        self.idle_s = 0.0
        self._ended_at = time.perf_counter()

    @override
    def enqueue(self, work: Callable[[], None]) -> EnqueuedWork:
        self.idle_s += time.perf_counter() - self._ended_at
        enqueued = super().enqueue(work)
        self._ended_at = time.perf_counter()
        return enqueued


class AheadStream(HostStream):
    """A device with a clock of its own, on which work takes as long as on the host, which gives it work in no time."""

    is_async = True

    def __init__(self) -> None:
        self.idle_s = 0.0
        self._ended_at = 0.0
        # What the host's clock leaves out, because the device did it, and what the host has waited for that.
        self._computing_s = 0.0
        self._waited_s = 0.0

    @property
    def _now(self) -> float:
        return time.perf_counter() - self._computing_s + self._waited_s

    @override
    def enqueue(self, work: Callable[[], None]) -> EnqueuedWork:
        started_at = max(self._now, self._ended_at)
        self.idle_s += started_at - self._ended_at
        enqueued = super().enqueue(work)
        computing_s = enqueued.wait() / 1e6
        self._computing_s += computing_s
        self._ended_at = started_at + computing_s
        return _AheadWork(self, self._ended_at, enqueued)

    def wait_until(self, moment: float) -> None:
        """Advance the host's clock to a moment of the device's."""
        self._waited_s += max(moment - self._now, 0.0)


class _AheadWork(NamedTuple):
    stream: AheadStream
    ended_at: float
    work: EnqueuedWork

    def wait(self) -> int:
        """See `EnqueuedWork`."""
        self.stream.wait_until(self.ended_at)
        return self.work.wait()


def main() -> None:
    """Measure; print a table, and write `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--num-rows", nargs="+", type=int, default=[1, BASE_ROWS, 32, MOST_ROWS])
    parser.add_argument("--steps", type=int, default=200, help="steps measured for each number of rows")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    stream, ahead = TimedStream(), AheadStream()
    runner = make_runner(args.layers, stream=stream)
    rows_to_times = {num_rows: step_times(runner, num_rows, args.steps, stream) for num_rows in args.num_rows}
    base = rows_to_times.get(BASE_ROWS)
    rows = [
        _row(num_rows, times.step_ms, None if base is None else base.step_ms)
        for num_rows, times in rows_to_times.items()
    ]
    few_rows = [each for each in args.num_rows if each <= MOST_DRAFTED_ROWS]
    for name, make_drafting in {"n-gram": _by_ngrams, "draft model": _by_model}.items():
        drafting = make_runner(args.layers, make_drafting(), stream=stream)
        drafting_ahead = make_runner(args.layers, make_drafting(), stream=ahead)
        for num_rows in few_rows:
            plain, drafted = rows_to_times[num_rows], step_times(drafting, num_rows, args.steps, stream)
            idle_ms = step_times(drafting_ahead, num_rows, args.steps, ahead).idle_ms
            metric = f"drafted step of {num_rows}, {name}"
            rows.append(Row(f"{metric}, host only", drafted.step_ms, "ms", reference=plain.step_ms))
            rows.append(Row(f"{metric}, its device idle", drafted.idle_ms, "ms", reference=plain.idle_ms))
            rows.append(Row(f"{metric}, its device idle, sent ahead", idle_ms, "ms"))
    print_table(rows)
    if args.json is not None:
        write_json(rows, args.json)


def make_runner(num_layers: int, drafting: Drafting | None = None, *, stream: HostStream | None = None) -> ModelRunner:
    """A runner of a small model with this many layers; only their number matters. All drafts are right."""
    loaded, ops = _load(num_layers)
    return ModelRunner(loaded, ops, KvCacheSize(2**32), drafting=drafting, execution=Execution(stream=stream))


def _by_ngrams() -> Drafting:
    return Drafting(NgramProposer(), NUM_DRAFT_TOKENS)


def _by_model() -> Drafting:
    loaded, ops = _load(NUM_DRAFT_LAYERS)
    return Drafting(DraftModelProposer(loaded.model, ops), NUM_DRAFT_TOKENS)


def _load(num_layers: int) -> tuple[LoadedModel, NullOps]:
    config = {**CONFIGS["tiny"], "num_hidden_layers": num_layers}
    ops = NullOps()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return load_model(Path(folder), ops, torch.float32, lambda _: None, options=LoadOptions(dummy_seed=0)), ops


class StepTimes(NamedTuple):
    """The shortest of some decode steps, and the least time that the device was idle in one."""

    step_ms: float
    idle_ms: float


def step_times(runner: ModelRunner, num_rows: int, num_steps: int, stream: TimedStream | AheadStream) -> StepTimes:
    """The least times of a runner that computes on `stream`: other processes only make one longer."""
    num_tokens = NUM_PROMPT_TOKENS + num_steps * (1 + runner.num_draft_tokens) + 1
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    runner.attach(block_size=BLOCK_SIZE, max_num_seqs=num_rows, max_num_batched_tokens=NUM_PROMPT_TOKENS * num_rows)
    blocks = (range(slot * num_blocks, (slot + 1) * num_blocks) for slot in range(num_rows))
    prompt = list(range(NUM_PROMPT_TOKENS))
    enters = [make_enter(slot, prompt, ids, max_num_tokens=num_tokens) for slot, ids in enumerate(blocks)]
    pending = runner.launch(prefill_step(*enters))
    step_s, idle_s = [], []
    for _ in range(num_steps):
        started, stream.idle_s = time.perf_counter(), 0.0
        if not stream.is_async:
            pending.finish()
        launched = runner.launch(decode_step())
        if stream.is_async:
            pending.finish()
        pending = launched
        step_s.append(time.perf_counter() - started)
        idle_s.append(stream.idle_s)
    pending.finish()
    return StepTimes(min(step_s) * 1e3, min(idle_s) * 1e3)


def _row(num_rows: int, ms: float, base_ms: float | None) -> Row:
    metric = f"decode step of {num_rows}, host only"
    if num_rows == 1:
        return limit(metric, ms, "ms", at_most=MOST_MS_OF_ONE_ROW)
    if num_rows == MOST_ROWS and base_ms is not None:
        return compare(metric, ms, "ms", reference=base_ms, at_most=MOST_RATIO)
    return Row(metric, ms, "ms")


if __name__ == "__main__":
    main()
