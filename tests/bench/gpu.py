"""Measures the worker's model runner on a GPU, with random weights: decode steps from graphs, and prefills.

Each figure is compared with a floor that the same run measures: the bytes that a step must read at the rate of a copy,
or its operations at the rate of a large matrix product, whichever takes longer. Rows are written as they come, and no
case begins that `--budget-s` may not hold. `tests.bench.gpu_pack` packs what a machine without network needs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch

from services.worker.config import WorkerSettings
from services.worker.runner.model_runner import ModelRunner, build_model_runner
from services.worker.runner.pending_step import PendingStep
from services.worker.step import EnteringSequence
from tests.bench.report import Row, compare, print_table, write_json
from tests.support.worker_steps import decode_step, make_enter, prefill_step

BLOCK_SIZE = 16
_GIB = 2**30
# A case that took this many times as long as planned would still end within the budget.
_SAFETY = 1.5
# Configurations as published; the vocabulary is read by the head, so it counts.
_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "llama-3.1-8b": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
}


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device was measured to do."""

    bytes_per_s: float
    operations_per_s: float

    def floor_s(self, num_bytes: float, num_operations: float) -> float:
        """The shortest time for work that reads so many bytes."""
        return max(num_bytes / self.bytes_per_s, num_operations / self.operations_per_s)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a step of a configuration reads and computes."""

    config: dict[str, Any]
    item_bytes: int

    @classmethod
    def of(cls, shape: str, device: torch.device) -> Sizes:
        """Those of a shape in the dtype that `auto` is on the device."""
        return cls(CONFIGS[shape], 2 if device.type == "cuda" else 4)

    @property
    def num_weights(self) -> int:
        """Weights of all matrix products, the head's included."""
        config = self.config
        hidden, width = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        attention = hidden * width * (2 * heads + 2 * kv_heads)
        layer = attention + 3 * hidden * config["intermediate_size"]
        return int(config["num_hidden_layers"] * layer + hidden * config["vocab_size"])

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        config = self.config
        return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])

    def decode_floor_s(self, rates: Rates, num_seqs: int, context_len: int) -> float:
        """The matrix products' floor and attention's."""
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        products = rates.floor_s(self.num_weights * self.item_bytes, 2 * self.num_weights * num_seqs)
        kv_values = self.kv_values_per_token * num_seqs * context_len
        return products + rates.floor_s(kv_values * self.item_bytes, 2 * kv_values * group)

    def prefill_floor_s(self, rates: Rates, num_seqs: int, length: int) -> float:
        """The same for whole prompts; the head is needed for their last tokens only."""
        head = self.config["hidden_size"] * self.config["vocab_size"]
        operations = 2 * (self.num_weights - head) * num_seqs * length + 2 * head * num_seqs
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        attended = num_seqs * length * (length + 1) / 2
        operations += 2 * self.kv_values_per_token * group * attended
        return rates.floor_s(self.num_weights * self.item_bytes, operations)


class Clock:
    """Measures work on the device, and what is left of the budget."""

    def __init__(self, device: torch.device, ends_at: float) -> None:
        """The budget ends at `ends_at`, in seconds of `time.monotonic`."""
        self._device = device
        self._ends_at = ends_at

    def seconds(self, work: Callable[[], object]) -> float:
        """How long `work` takes until the device has done it."""
        self._wait()
        started = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - started

    def median_s(self, work: Callable[[], object], repeats: int) -> float:
        """The median of several times, after a warm-up."""
        work()
        return statistics.median(self.seconds(work) for _ in range(repeats))

    def holds(self, seconds: float) -> bool:
        """Whether work that takes about this long would end within the budget."""
        return time.monotonic() + _SAFETY * seconds < self._ends_at

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    """Measure; write rows to stdout and to `--json` as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=CONFIGS, default=["qwen3-0.6b", "qwen3-8b", "llama-3.1-8b"])
    parser.add_argument("--backends", nargs="+", default=["auto"], help="ops backends, such as auto triton-exact")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--context", type=int, default=1024, help="tokens before the measured decode steps")
    parser.add_argument("--steps", type=int, default=32, help="decode steps measured at each batch size")
    parser.add_argument("--prefill", nargs=2, type=int, default=[8, 2048], metavar=("SEQS", "LENGTH"))
    parser.add_argument("--enforce-eager", action="store_true", help="capture no graphs")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-cache-gib", type=float, help="KV cache; by default what the device has left")
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    args = parser.parse_args()
    rows: list[Row] = []
    for row in measure(args):
        rows.append(row)
        print(json.dumps({"metric": row.metric, "value": row.value, "ratio": row.ratio}), file=sys.stderr, flush=True)
        if args.json is not None:
            write_json(rows, args.json)
    print_table(rows)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Measure the device's rates, and then each shape."""
    ends_at = time.monotonic() + args.budget_s
    with tempfile.TemporaryDirectory() as folder:
        rates: Rates | None = None
        for shape, backend in product(args.shapes, args.backends):
            started = time.monotonic()
            runner = make_runner(shape, backend, Path(folder), args)
            case = shape if backend == "auto" else f"{shape}, {backend}"
            yield Row(f"{case}: weights made", time.monotonic() - started, "s")
            clock = Clock(runner.device, ends_at)
            if rates is None:
                rates = measure_rates(clock, runner.device)
                yield Row("copy, bytes read and written", rates.bytes_per_s / 1e9, "GB/s")
                yield Row("matrix product", rates.operations_per_s / 1e12, "TFLOP/s")
            yield from measure_runner(case, runner, (rates, Sizes.of(shape, runner.device)), clock, args)
            del runner


def make_runner(shape: str, backend: Any, folder: Path, args: argparse.Namespace) -> ModelRunner:
    """A runner with random weights on the device."""
    model_dir = folder / shape
    model_dir.mkdir(exist_ok=True)
    (model_dir / "config.json").write_text(json.dumps(CONFIGS[shape]), encoding="utf-8")
    settings = WorkerSettings(
        model_dir=model_dir,
        load_format="dummy",
        device=args.device,
        ops_backend=backend,
        enforce_eager=args.enforce_eager,
        kv_cache_memory_gib=args.kv_cache_gib,
    )
    return build_model_runner(settings, lambda _: None)


def measure_rates(clock: Clock, device: torch.device) -> Rates:
    """Copy a large tensor, and multiply two square matrices."""
    is_gpu = device.type == "cuda"
    source = torch.ones(_GIB if is_gpu else _GIB // 16, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    size, dtype = (8192, torch.bfloat16) if is_gpu else (512, torch.float32)
    a, b = torch.randn(2, size, size, dtype=dtype, device=device)
    copy_s = clock.median_s(lambda: target.copy_(source), 10)
    return Rates(2 * len(source) / copy_s, 2 * size**3 / clock.median_s(lambda: a @ b, 10))


def measure_runner(
    case: str, runner: ModelRunner, floor: tuple[Rates, Sizes], clock: Clock, args: argparse.Namespace
) -> Iterator[Row]:
    """Prefill whole prompts, then decode at each batch size after `--context` tokens."""
    rates, sizes = floor
    num_seqs, length = args.prefill
    max_num_seqs = max(*args.batch_sizes, num_seqs)
    limits = {"block_size": BLOCK_SIZE, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": num_seqs * length}
    attach_s = clock.seconds(lambda: runner.attach(**limits))
    yield Row(f"{case}: attach, with {runner.num_blocks} blocks and graphs", attach_s, "s")
    prompts = list(islice(enters(length, length + 1), num_seqs))

    def prefill() -> None:
        runner.attach(**limits)
        runner.run_step(prefill_step(*prompts))

    floor_s = sizes.prefill_floor_s(rates, num_seqs, length)
    yield compare(
        f"{case}: prefill of {num_seqs} x {length}",
        floor_s * 1e3,
        "ms floor",
        reference=clock.median_s(prefill, 3) * 1e3,
    )
    for batch_size in args.batch_sizes:
        if clock.holds(60 * args.steps * sizes.decode_floor_s(rates, batch_size, args.context)):
            yield decode_row(case, runner, floor, clock, batch_size=batch_size, args=args, limits=limits)


def decode_row(
    case: str,
    runner: ModelRunner,
    floor: tuple[Rates, Sizes],
    clock: Clock,
    *,
    batch_size: int,
    args: argparse.Namespace,
    limits: dict[str, int],
) -> Row:
    """A decode step of `batch_size` sequences that have about `--context` tokens, launched one ahead; the mean."""
    rates, sizes = floor
    runner.attach(**limits)
    at_once = max(1, limits["max_num_batched_tokens"] // args.context)
    waiting = enters(args.context, args.context + 2 * args.steps)
    batch = list(islice(waiting, batch_size))
    for first in range(0, batch_size, at_once):
        runner.run_step(prefill_step(*batch[first : first + at_once]))
    decode_ahead(runner, 2)
    step_s = clock.seconds(lambda: decode_ahead(runner, args.steps)) / args.steps
    floor_s = sizes.decode_floor_s(rates, batch_size, args.context)
    name = f"{case}: decode step of {batch_size} after {args.context}"
    return compare(name, floor_s * 1e3, "ms floor", reference=step_s * 1e3)


def decode_ahead(runner: ModelRunner, num_steps: int) -> None:
    """Run decode steps, each launched before the one before it has returned. A launch that waits for a GPU fails."""
    pending: PendingStep | None = None
    for _ in range(num_steps):
        with without_waiting(runner.device):
            launched = runner.launch(decode_step())
        if pending is not None:
            pending.finish()
        pending = launched
    if pending is not None:
        pending.finish()


@contextmanager
def without_waiting(device: torch.device) -> Iterator[None]:
    """Let whatever waits for a GPU in the body raise."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def enters(length: int, num_tokens: int) -> Iterator[EnteringSequence]:
    """Greedy sequences of `length` prompt tokens, each with blocks of its own for `num_tokens`."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    slot = 0
    while True:
        prompt = [(7 * slot + 13 * place) % 251 for place in range(length)]
        blocks = range(slot * num_blocks, (slot + 1) * num_blocks)
        yield make_enter(slot, prompt, blocks, max_num_tokens=num_tokens)
        slot += 1


if __name__ == "__main__":
    main()
