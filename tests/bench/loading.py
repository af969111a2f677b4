"""How fast a model's weights are loaded, hashing included, beside reading alone; by ranks and threads.

Ranks are threads of this process that read one copy of the files, which is in the page cache, and copy their part of
each tensor as loading does. Reading alone is the same without hashing.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from services.worker.layout import RankLayout
from services.worker.parallel.communicator import Parallel
from services.worker.weights.tensor_digests import Hashing
from services.worker.weights.weight_files import WeightFiles
from shared.model_files.model_dir import WEIGHTS
from tests.bench.parts.report import Row, compare, report
from tests.support.ranks.thread_ranks import run_ranks

# Of one tensor, bfloat16: 32 MiB, as in a layer of a model of 7 billion weights.
_SHAPE = (4096, 4096)
_TENSOR_MIB = 32
_GB = 1e9


def _write_model(directory: Path, num_tensors: int) -> None:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randint(-(1 << 15), 1 << 15, _SHAPE, generator=generator, dtype=torch.int16).view(torch.bfloat16)
    save_file({f"layers.{index}.weight": whole.roll(index) for index in range(num_tensors)}, directory / WEIGHTS)


def _read(directory: Path, rank: Parallel) -> None:
    with safe_open(directory / WEIGHTS, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            file.get_tensor(name)[rank.tp.rank :: rank.tp.size].clone()


def _load(directory: Path, num_threads: int, rank: Parallel) -> None:
    with WeightFiles(directory, hashing=Hashing(rank.tp, num_threads=num_threads)) as files:
        for name in files.names:
            files.read(name)[rank.tp.rank :: rank.tp.size].clone()
        files.digest()


@dataclass(frozen=True, slots=True)
class _Cost:
    gb_s: float
    """The model's bytes by the time until the last rank is done."""
    cpu_s_per_gb: float
    """Of all ranks together: what it costs, however busy the machine is."""


def _measure_ranks(num_bytes: int, num_ranks: int, function: Callable[[Parallel], None], repeats: int) -> _Cost:
    """The best of some runs."""
    layouts = [RankLayout(tp_rank=rank, tp_size=num_ranks) for rank in range(num_ranks)]

    def timed(rank: Parallel) -> tuple[float, float, float]:
        # All ranks begin together, and end together.
        rank.tp.all_gather(torch.zeros(1, 1), (1,) * num_ranks)
        started_at, cpu_before = time.perf_counter(), time.process_time()
        function(rank)
        rank.tp.all_gather(torch.zeros(1, 1), (1,) * num_ranks)
        return started_at, time.perf_counter(), time.process_time() - cpu_before

    durations, cpu_times = [], []
    for _ in range(repeats):
        started, ended, cpu = zip(*run_ranks(layouts, timed), strict=True)
        durations.append(max(ended) - min(started))
        cpu_times.append(max(cpu))
    return _Cost(num_bytes / min(durations) / _GB, min(cpu_times) / num_bytes * _GB)


def _hash_gb_s(num_bytes: int, repeats: int) -> float:
    content, durations = bytes(num_bytes), []
    for _ in range(repeats):
        started_at = time.perf_counter()
        hashlib.sha256(content)
        durations.append(time.perf_counter() - started_at)
    return num_bytes / min(durations) / _GB


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Rate and processor time of each number of ranks and threads."""
    num_bytes, repeats = arguments.tensors * _TENSOR_MIB << 20, arguments.repeats
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        _write_model(directory, arguments.tensors)
        yield Row("SHA-256, one thread", _hash_gb_s(_TENSOR_MIB << 20, repeats), "GB/s")
        for num_ranks in arguments.ranks:
            reading = _measure_ranks(num_bytes, num_ranks, partial(_read, directory), repeats)
            yield Row(f"reading alone, ranks: {num_ranks}", reading.gb_s, "GB/s")
            for num_threads in arguments.threads:
                loading = _measure_ranks(num_bytes, num_ranks, partial(_load, directory, num_threads), repeats)
                metric = f"loading, ranks: {num_ranks}, threads of each: {num_threads}"
                yield compare(metric, loading.gb_s, "GB/s", reference=reading.gb_s)
                cost = f"{metric}: processor time"
                yield compare(cost, loading.cpu_s_per_gb, "s/GB", reference=reading.cpu_s_per_gb)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=64, help=f"of {_TENSOR_MIB} MiB each")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report(list(measure(arguments)), arguments.json)


if __name__ == "__main__":
    main()
