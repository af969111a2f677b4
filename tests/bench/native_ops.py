"""Products of the native kernels: bytes of weights and multiplications per second, beside what the machine can do.

    python -m tests.bench.native_ops
    python -m tests.bench.native_ops --formats int8 int4 --rows 1 32 --json native_ops.json

For each model all products of a layer are called one after the other, layer by layer, so that no weights are still in a
cache from the last call. A time is the sum of each product's shortest: other processes only make calls longer. The
bounds are a loop that only reads memory, and one that only multiplies bytes in registers; float products are compared
with the `cpu` backend instead.

    python -m tests.bench.native_ops --beside avx512_bf16 --formats int4 q4_k q6_k

With `--beside`, products take turns with those of other instructions in the same process, on one thread. A time is then
the thread's processor time, which other processes change least.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from struct import Struct

# Read by OpenMP when torch loads it, for the `cpu` backend; as in the worker.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from torch import Tensor

from services.worker.ops import LinearKernel, Matrix, Ops, load_ops
from services.worker.ops.block_types import BLOCK_TYPES
from services.worker.ops.matrices import BlockMatrix, IntMatrix, Mxfp4Matrix
from services.worker.ops.native.isa import Isa, available_isas
from services.worker.ops.native.library import load_library
from shared.process.cores import num_usable_cores
from tests.bench.parts.report import Row, compare, report

# (out_features, in_features) of query-key-value, output, gate-up and down projections.
MODELS = {
    "135M": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
    "1.1B": ((2560, 2048), (2048, 2048), (11264, 2048), (2048, 5632)),
}
# GGUF's blocks have 256 columns.
BLOCK_MODELS = {**MODELS, "135M": ((960, 512), (512, 512), (3072, 512), (512, 1536))}
BLOCKS = {name.lower(): BLOCK_TYPES[name] for name in ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS")}
FORMATS = ("float32", "bfloat16", "int8", "int4", "mxfp4", *BLOCKS)
_DTYPES = {"bfloat16": torch.bfloat16}
_GIB = 1e9


Clock = Callable[[], float]


def shortest_s(function: Callable[[], object], repeats: int, clock: Clock = time.perf_counter) -> float:
    """The shortest of `repeats` calls, in seconds."""
    times = []
    for _ in range(repeats):
        started_at = clock()
        function()
        times.append(clock() - started_at)
    return min(times)


def make_weight(form: str, num_rows: int, num_columns: int) -> Matrix:
    """Random weights: integers have a scale per row, 4-bit ones per 32 columns."""
    if form in ("float32", "bfloat16"):
        return torch.randn(num_rows, num_columns).to(_DTYPES.get(form, torch.float32))
    if form == "int8":
        codes = torch.randint(-128, 128, (num_rows, num_columns)).to(torch.int8)
        return IntMatrix(8, codes, torch.rand(num_rows, 1), num_columns)
    if form in BLOCKS:
        block_type = BLOCKS[form]
        blocks = torch.randint(0, 256, (num_rows, num_columns // block_type.num_values, block_type.num_bytes))
        for at in block_type.float16_at:
            # A small float16, whatever the byte below.
            blocks[..., at + 1] = 0x20
        return BlockMatrix(block_type, blocks.to(torch.uint8))
    codes = torch.randint(0, 256, (num_rows, num_columns // 2)).to(torch.uint8)
    if form == "int4":
        return IntMatrix(4, codes, torch.rand(num_rows, num_columns // 32).half().float(), 32)
    return Mxfp4Matrix(codes, torch.randint(110, 130, (num_rows, num_columns // 32)).to(torch.uint8))


class Machine:
    """What the machine can do at most, with the same instructions and threads."""

    def __init__(self, isa: Isa, *, size_mib: int, repeats: int) -> None:
        self._library = load_library(isa)
        self.read_gb_s = self._read_rate(size_mib << 20, repeats)
        self.dot_gop_s = self._dot_rate(repeats)

    def _read_rate(self, size: int, repeats: int) -> float:
        source, total = torch.ones(size, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
        part = 16 << 20
        pack, starts = Struct("PqP").pack, range(0, size, part)
        calls = [pack(source.data_ptr() + start, min(part, size - start), total.data_ptr()) for start in starts]
        times = [shortest_s(partial(self._library.ls_read, call), 1) for _ in range(repeats) for call in calls]
        return min(part, size) / min(times) / _GIB

    def _dot_rate(self, repeats: int) -> float:
        results = torch.zeros(2, dtype=torch.int64)
        call = Struct("qPP").pack(20000, results.data_ptr(), results[1:].data_ptr())
        duration_s = shortest_s(partial(self._library.ls_dot, call), 10 * repeats)
        return 2 * int(results[0]) / duration_s / _GIB


class Layers:
    """Layers of products in one format."""

    def __init__(self, ops: Ops, model: str, form: str, num_layers: int) -> None:
        self._dtype = _DTYPES.get(form, torch.float32)
        self._shapes = (BLOCK_MODELS if form in BLOCKS else MODELS)[model]
        self._layers = [self._layer(ops, form) for _ in range(num_layers)]

    def _layer(self, ops: Ops, form: str) -> list[LinearKernel]:
        return [ops.prepare_linear(make_weight(form, *shape), None, self._dtype) for shape in self._shapes]

    @property
    def num_weights(self) -> int:
        """One layer's."""
        return sum(num_rows * num_columns for num_rows, num_columns in self._shapes)

    def inputs(self, num_rows: int) -> list[Tensor]:
        """Random ones of a layer's products."""
        return [torch.randn(num_rows, shape[1]).to(self._dtype) for shape in self._shapes]

    def layer_s(self, num_rows: int, repeats: int) -> float:
        """The time of one layer: the sum of its products' shortest."""
        inputs = self.inputs(num_rows)
        return sum_of_shortest(self.times(inputs, time.perf_counter) for _ in range(repeats))

    def times(self, inputs: list[Tensor], clock: Clock) -> list[float]:
        """The shortest call of each product among all layers, one layer after the other."""
        calls = [self._times(layer, inputs, clock) for layer in self._layers]
        return [min(times) for times in zip(*calls, strict=True)]

    @staticmethod
    def _times(layer: list[LinearKernel], inputs: list[Tensor], clock: Clock) -> list[float]:
        return [shortest_s(partial(kernel, x), 1, clock) for kernel, x in zip(layer, inputs, strict=True)]


def sum_of_shortest(repeats: Iterable[list[float]]) -> float:
    """The sum of each product's shortest time."""
    of_products: Iterable[tuple[float, ...]] = zip(*repeats, strict=True)
    return sum(min(times) for times in of_products)


def processor_times(layers: list[Layers], num_rows: int, repeats: int) -> list[float]:
    """As `Layers.layer_s`, of several that take turns, by the processor time of this thread, on which they run."""
    inputs = layers[0].inputs(num_rows)
    # Each comes first as often as the others, as the first one finds fewer of the inputs in caches.
    turns: list[list[list[float]]] = [[] for _ in layers]
    for repeat in range(max(repeats, 2)):
        for place in range(len(layers))[:: -1 if repeat % 2 else 1]:
            turns[place].append(layers[place].times(inputs, time.thread_time))
    return [sum_of_shortest(each) for each in turns]


def bytes_per_weight(form: str) -> float:
    """What a step reads for a weight."""
    if form in BLOCKS:
        return BLOCKS[form].num_bytes / BLOCKS[form].num_values
    return {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 0.5 + 2 / 32, "mxfp4": 0.5 + 1 / 32}[form]


def num_repeats(arguments: argparse.Namespace, num_rows: int) -> int:
    """Fewer for many rows."""
    return max(1, int(arguments.repeats) * 8 // (8 + num_rows))


def measure_beside(arguments: argparse.Namespace) -> Iterator[Row]:
    """Each product's processor time beside that of other instructions."""
    names = (arguments.isa or available_isas()[-1].value, arguments.beside)
    backends = [load_ops("native", name) for name in names]
    for ops in backends:
        ops.use_threads(1)
    for model in arguments.models:
        for form in arguments.formats:
            layers = [Layers(ops, model, form, arguments.layers) for ops in backends]
            for num_rows in arguments.rows:
                own_s, other_s = processor_times(layers, num_rows, num_repeats(arguments, num_rows))
                metric = f"{model} {form}, {num_rows} rows: {names[0]} beside {names[1]}"
                yield compare(metric, own_s * 1e6, "us", reference=other_s * 1e6)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """One section for each model and format."""
    isa = Isa(arguments.isa) if arguments.isa else available_isas()[-1]
    native, cpu = load_ops("native", isa.value), load_ops("cpu")
    # The `cpu` backend's, which are torch's, come last: `native` leaves one to torch.
    for ops in (native, cpu):
        ops.use_threads(arguments.num_threads)
    machine = Machine(isa, size_mib=arguments.read_mib, repeats=arguments.repeats)
    yield Row("memory read", machine.read_gb_s, "GB/s")
    yield Row("int8 products", machine.dot_gop_s, "GOP/s")
    for model in arguments.models:
        for form in arguments.formats:
            layers = Layers(native, model, form, arguments.layers)
            others = Layers(cpu, model, form, arguments.layers) if form in ("float32", "bfloat16") else None
            for num_rows in arguments.rows:
                repeats = num_repeats(arguments, num_rows)
                duration_s = layers.layer_s(num_rows, repeats)
                name = f"{model} {form}, {num_rows} rows"
                read_gb_s = layers.num_weights * bytes_per_weight(form) / duration_s / _GIB
                yield compare(f"{name}: weights", read_gb_s, "GB/s", reference=machine.read_gb_s)
                gop_s = 2 * layers.num_weights * num_rows / duration_s / _GIB
                if others is None:
                    yield compare(f"{name}: products", gop_s, "GOP/s", reference=machine.dot_gop_s)
                else:
                    reference = 2 * layers.num_weights * num_rows / others.layer_s(num_rows, repeats) / _GIB
                    yield compare(f"{name}: products, cpu backend", gop_s, "GOP/s", reference=reference)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 512])
    parser.add_argument("--isa", choices=[isa.value for isa in Isa], help="by default the processor's best")
    parser.add_argument("--beside", choices=[isa.value for isa in Isa], help="compare with these instructions")
    parser.add_argument("--layers", type=int, default=8, help="layers of weights, which should not fit in a cache")
    parser.add_argument("--read-mib", type=int, default=256, help="memory that the read loop reads")
    parser.add_argument("--repeats", type=int, default=40, help="fewer for many rows")
    parser.add_argument("--num-threads", type=int, default=num_usable_cores(), help="all cores by default")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure_beside(arguments) if arguments.beside else measure(arguments)
    report(list(rows), arguments.json)


if __name__ == "__main__":
    main()
