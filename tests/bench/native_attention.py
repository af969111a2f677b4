"""The `native` backend's attention beside the `cpu` backend's, for one layer of SmolLM2-135M.

    python -m tests.bench.native_attention --json attention.json

A figure is the shortest of many runs, as other processes may use the machine too. Several layers take turns, so that a
context comes from where a model's comes from, and not from a core's own cache. GB/s count each key and value
once, and are compared with the rate at which the machine reads a large tensor.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata
from services.worker.forward.kv_cache import KvCache, KvCacheSpec, attention_cache
from services.worker.ops import AttentionParams, Ops, load_ops
from shared.process.cores import num_usable_cores
from tests.bench.parts.report import Row, compare, report
from tests.support.kernels.attention_batches import Batch, random

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 3, 64
PARAMS = AttentionParams(HEAD_DIM**-0.5)
BLOCK_SIZE = 16
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True)
class Case:
    """A step's sequences: tokens in the cache, and new ones."""

    num_seqs: int
    num_cached: int
    num_new: int

    @property
    def batch(self) -> Batch:
        """The step."""
        return Batch(BLOCK_SIZE, [self.num_cached] * self.num_seqs, [self.num_new] * self.num_seqs, order=1)

    @property
    def num_multiplications(self) -> int:
        """Those of queries with keys, and of weights with values."""
        pairs = self.num_seqs * sum(range(self.num_cached + 1, self.num_cached + self.num_new + 1))
        return 2 * pairs * NUM_HEADS * HEAD_DIM


CASES = {
    "decode, 1 row of 256": Case(1, 255, 1),
    "decode, 8 rows of 256": Case(8, 255, 1),
    "decode, 32 rows of 256": Case(32, 255, 1),
    "decode, 1 row of 8k": Case(1, 8191, 1),
    "chunk of 512": Case(1, 0, 512),
    "chunk of 512 after 2k": Case(1, 2048, 512),
    "prompt of 1024": Case(1, 0, 1024),
}
QUICK_CASES = ("decode, 8 rows of 256", "chunk of 512")


class Layers:
    """A few layers' caches with random contents, and the queries of a step."""

    def __init__(self, case: Case, dtype: torch.dtype, cache_dtype: torch.dtype, num_layers: int) -> None:
        self._metadata: AttentionMetadata = case.batch.metadata(is_prefill=case.num_new > 1)
        spec = KvCacheSpec((attention_cache(NUM_KV_HEADS, HEAD_DIM, cache_dtype),) * num_layers)
        self._cache = KvCache(spec, case.batch.num_blocks, BLOCK_SIZE)
        for tensor in (tensor for layer in self._cache.layers for tensor in layer):
            if cache_dtype == torch.int8:
                tensor.fill_(1)
            else:
                tensor.normal_()
        qkv = random(case.batch.num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM).to(dtype)
        self._heads: tuple[Tensor, ...] = torch.split(qkv, [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        num_tokens = case.num_seqs * (case.num_cached + case.num_new)
        self.num_bytes = spec.bytes_per_token // num_layers * num_tokens

    def seconds(self, ops: Ops, duration_s: float) -> float:
        """A layer's shortest time among as many runs as `duration_s` allows."""
        plan = ops.plan_attention(self._metadata, self._cache)
        query, key, value = self._heads

        def attend(layer: tuple[Tensor, ...]) -> Tensor:
            if self._metadata.is_prefill:
                return ops.prefill_attention(query, key, value, layer, plan, PARAMS)
            return ops.decode_attention(query, layer, plan, PARAMS)

        return shortest_s([partial(attend, layer) for layer in self._cache.layers], duration_s)


def shortest_s(works: Sequence[Callable[[], object]], duration_s: float) -> float:
    """The shortest time of one of `works`, which take turns for `duration_s`, at least twice each."""
    ends_at, times = time.monotonic() + duration_s, list[float]()
    while len(times) < 2 * len(works) or time.monotonic() < ends_at:
        for work in works:
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
    return min(times)


def read_rate(duration_s: float) -> float:
    """Bytes per second at which all threads together read a tensor of 256 MiB."""
    numbers = torch.ones(64 * 2**20)
    return numbers.nbytes / shortest_s([numbers.sum], duration_s)


def main() -> None:
    """Measure, print the table, write the JSON."""
    args = _parse_args()
    with torch.inference_mode():
        rows = list(_rows(args))
    print(f"{args.num_threads} threads, {load_ops('native').numerics()}")
    report(rows, args.json)


def _rows(args: argparse.Namespace) -> Iterator[Row]:
    native, cpu = load_ops("native"), load_ops("cpu")
    # The `cpu` backend's, which are torch's, come last: `native` leaves one to torch.
    for ops in (native, cpu):
        ops.use_threads(args.num_threads)
    duration_s, num_layers = (0.02, 2) if args.quick else (args.seconds, 8)
    rate = read_rate(duration_s)
    for name in QUICK_CASES if args.quick else CASES:
        case = CASES[name]
        for cache_format, cache_dtype in FORMATS.items():
            # Codes are read by queries of any type; bfloat16 is what they come with.
            dtype = torch.bfloat16 if cache_dtype == torch.int8 else cache_dtype
            layers = Layers(case, dtype, cache_dtype, num_layers)
            own_s = layers.seconds(native, duration_s)
            metric = f"{name}, {cache_format}"
            if cache_dtype == dtype:
                yield compare(metric, own_s * 1e6, "us", reference=layers.seconds(cpu, duration_s) * 1e6)
            else:
                yield Row(metric, own_s * 1e6, "us")
            if case.num_new == 1:
                yield compare("  reading", layers.num_bytes / own_s / 1e9, "GB/s", reference=rate / 1e9)
            else:
                yield Row("  computing", 2 * case.num_multiplications / own_s / 1e9, "GFLOP/s")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two cases, few short runs")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each figure")
    parser.add_argument("--num-threads", type=int, default=num_usable_cores(), help="all cores by default")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
