"""Our cell on a CPU beside what users would pick instead: llama.cpp, OpenVINO GenAI, vLLM's CPU build, transformers.

    python -m tests.bench.cpu_peers models/smollm2-135m-instruct-float32 --json cpu_peers.json
    python -m tests.bench.cpu_peers models/smollm2-135m-instruct-float32 --formats int8
    python -m tests.bench.cpu_peers models/smollm2-135m-instruct-float32 --without-cell

Ours answers through all three services over gRPC. A peer is a library in one process, which gets the same prompts as
token ids. The first run makes the peers' environments and model files in .cache/: half an hour on two cores, 4 GB.
A peer that cannot be installed, or does not run here, is left out by name.

For each format of weights, our cell and its peers take turns, repeat by repeat; a side that does not compute is idle. A
load is a number of requests that start together: output tokens per second, with prefill; or one long prompt with one
output token. A figure is that of the best repeat, since other work on the machine only slows. The reference is the best
peer's.

    formats  each format beside its peers; what its steps read and multiply, beside what the machine can; memory
    long     one request with almost 8k tokens of context
    large    a random Llama of 1.1 B parameters in int8 and in Q4_K_M, beside llama.cpp

What a step reads is weights and KV cache, with scales only in Q4_K_M; its time is that between two tokens. Memory is
private memory that the worker has written to, above what importing it takes: at most packed weights, the KV cache
touched and 200 MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.bench.parts.cpu_formats import (
    FORMATS,
    INT8_FORMATS,
    LARGE_FORMATS,
    Figures,
    ModelSize,
    best,
    format_rows,
    products_row,
    read_row,
    throughput_rows,
    tile_rows,
)
from tests.bench.parts.machine_rates import MachineRates, NoCompilerError
from tests.bench.parts.report import Row, limit, report, run_sections
from tests.bench.parts.worker_memory import MemoryWatch, importing_bytes, private_bytes
from tests.bench.peers.cpu_cell import CellEngine, start_cell_engine
from tests.bench.peers.cpu_files import large_model, large_q4_k_m_model
from tests.bench.peers.cpu_generation import Generate, Loads
from tests.bench.peers.cpu_peers import PEERS, PeerArguments, large_arguments
from tests.bench.peers.environments import LeftOutError

Run = Callable[[], Figures]

MACHINE = "the machine"
LONG_PROMPT_TOKENS = 7936
# Those of SmolLM2 have the same names and sizes.
ALL_FORMATS = {**LARGE_FORMATS, **FORMATS}
PRODUCTS_REQUESTS = 32
MEMORY_MARGIN_MIB = 200
# What a worker on a CPU has by default.
KV_CACHE_BYTES = 1 << 30
MIB = 2**20


@dataclass(frozen=True, slots=True)
class OwnCell:
    """A running cell of ours, and the most private memory that its worker had before it served."""

    engine: CellEngine
    generate: Generate
    peak_bytes: int


def main() -> None:
    """Run the selected measurements, print the table, write the JSON."""
    args = _parse_args()
    bench = Bench(args)
    rows = run_sections(SECTIONS, args.only, bench)
    print(f"{len(os.sched_getaffinity(0))} cores, {args.repeats} repeats, {bench.loads}")
    for peer, reason in bench.left_out.items():
        print(f"left out: {peer}: {reason}")
    if not rows:
        sys.exit("nothing was measured")
    report(rows, args.json)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, help="the model of the cell; the peers' files are of SmolLM2-135M")
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=FORMATS,
        default=["bf16" if _has_avx512() else "fp32", "int8", "int4"],
        help="formats of our weights; by default bf16 (fp32 without AVX-512), int8 and int4",
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="the peers, where they apply")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="the sections to run")
    parser.add_argument("--without-cell", action="store_true", help="measure only the peers, with --only formats")
    parser.add_argument("--serve-flag", action="append", default=[], help="one more flag for our cells")
    parser.add_argument("--requests", type=_counts, default=(1, 8, 32), help="numbers of requests: 1,8,32")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--prefill", type=int, default=1024, help="tokens of the long prompt; 0 leaves it out")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _has_avx512() -> bool:
    return "avx512f" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()


class Bench:
    """The measurements of one run.

    Attributes:
        loads: The loads of the formats' comparison.
        left_out: What was not measured, and why, by name.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.loads = Loads(args.requests, args.prompt_tokens, args.output_tokens, args.prefill)
        self.left_out: dict[str, str] = {}
        self._args = args
        self._rates: MachineRates | None = None
        try:
            self._rates = MachineRates()
        except NoCompilerError as error:
            self.left_out["the machine's rates"] = str(error)

    def measure_formats(self) -> Iterator[Row]:
        """Every format of our weights beside its peers, the machine and the bounds of memory."""
        for name in self._args.formats:
            yield from self._measure_format(name)

    def measure_long(self) -> Iterator[Row]:
        """One request with a long context, beside the machine's rate of reading."""
        loads = Loads((1,), LONG_PROMPT_TOKENS, self._args.output_tokens)
        size = ModelSize.of(self._args.model_dir)
        for name in self._args.formats:
            with self._start_cell(name, self._args.model_dir, loads) as own:
                runs = {name: own.generate.run, **self._machine(name, size)}
                figures = take_turns(runs, self._args.repeats)
            yield from self._machine_rows(name, size, loads, own, figures)

    def measure_large(self) -> Iterator[Row]:
        """A random Llama of 1.1 B parameters in int8 and in Q4_K_M, beside llama.cpp."""
        model_dir = large_model(self._args.model_dir)
        yield from self._measure_large("int8", model_dir, "q8_0")
        yield from self._measure_large("q4_k_m", large_q4_k_m_model(self._args.model_dir), "q4_k_m")

    def _measure_large(self, name: str, model_dir: Path, kind: str) -> Iterator[Row]:
        """A format of ours beside a kind of llama.cpp's."""
        form, args = LARGE_FORMATS[name], self._args
        loads = Loads(tuple(form.throughput_targets), args.prompt_tokens, args.output_tokens, args.prefill)
        with contextlib.ExitStack() as stack:
            own = stack.enter_context(self._start_cell(name, model_dir, loads, "--worker.load-format=dummy"))
            size = ModelSize.of(model_dir)
            runs: dict[str, Run] = {name: own.generate.run, **self._machine(name, size)}
            for key in form.peers:
                self._add_peer(stack, key, lambda: large_arguments(large_model(args.model_dir), kind), loads, runs)
            figures = take_turns(runs, args.repeats)
            yield from format_rows(f"1.1 B parameters, {name}", name, form, loads, figures)
            yield from self._machine_rows(name, size, loads, own, figures)
            yield from self._memory_rows(name, size, own)

    def _measure_format(self, name: str) -> Iterator[Row]:
        form, size, model_dir = FORMATS[name], ModelSize.of(self._args.model_dir), self._args.model_dir
        with contextlib.ExitStack() as stack:
            runs: dict[str, Run] = {}
            cells: dict[str, OwnCell] = {}
            for own in () if self._args.without_cell else filter(None, (name, form.other_format)):
                cells[own] = stack.enter_context(self._start_cell(own, model_dir, self.loads))
                runs[own] = cells[own].generate.run
            for key in form.peers:
                self._add_peer(stack, key, partial(PEERS[key].arguments, model_dir), self.loads, runs)
            figures = take_turns({**runs, **self._machine(name, size)}, self._args.repeats)
            yield from throughput_rows(name, self.loads, figures)
            if name in cells:
                yield from self._machine_rows(name, size, self.loads, cells[name], figures)
                yield from self._memory_rows(name, size, cells[name])

    @contextlib.contextmanager
    def _start_cell(self, name: str, model_dir: Path, loads: Loads, *flags: str) -> Iterator[OwnCell]:
        print(f"{name} …", file=sys.stderr)
        all_flags = (*ALL_FORMATS[name].flags, *self._args.serve_flag, *flags)
        with contextlib.ExitStack() as stack:
            with MemoryWatch() as watch:
                engine = stack.enter_context(start_cell_engine(model_dir, *all_flags))
            yield OwnCell(engine, Generate([engine], loads), watch.peak)

    def _add_peer(
        self,
        stack: contextlib.ExitStack,
        key: str,
        make_arguments: Callable[[], PeerArguments],
        loads: Loads,
        runs: dict[str, Run],
    ) -> None:
        """Start a peer, unless it was not asked for or does not run here."""
        peer = PEERS[key]
        if key not in self._args.peers:
            self.left_out[peer.name] = "not asked for"
        if peer.name in self.left_out:
            return
        print(f"{peer.name} …", file=sys.stderr)
        try:
            process = stack.enter_context(peer.start(make_arguments(), loads))
        except LeftOutError as error:
            self.left_out[peer.name] = str(error)
        else:
            runs[peer.name] = lambda: process.run()[0]

    def _machine(self, name: str, size: ModelSize) -> dict[str, Run]:
        """The machine as a side of its own, which reads as much as the weights in a format."""
        rates = self._rates
        if rates is None:
            return {}
        return {MACHINE: lambda: rates.measure(size.weight_bytes(ALL_FORMATS[name]))}

    def _machine_rows(
        self, name: str, size: ModelSize, loads: Loads, own: OwnCell, figures: Mapping[str, Figures]
    ) -> Iterator[Row]:
        rates = figures.get(MACHINE)
        if rates is not None and 1 in loads.requests:
            yield read_row(name, ALL_FORMATS[name], size, loads, own.engine.step_s(1), rates)
        if rates is not None:
            yield from tile_rows(name, rates)
        if rates is not None and PRODUCTS_REQUESTS in loads.requests and name in INT8_FORMATS:
            yield products_row(name, size, PRODUCTS_REQUESTS, own.engine.step_s(PRODUCTS_REQUESTS), rates)

    def _memory_rows(self, name: str, size: ModelSize, own: OwnCell) -> Iterator[Row]:
        form = ALL_FORMATS[name]
        weights, importing = size.weight_bytes(form), importing_bytes()
        # Blocks that were never used come before those that a later prompt may share.
        kv_cache = min(size.kv_bytes(form, own.generate.num_tokens), KV_CACHE_BYTES)
        now = private_bytes(own.engine.cell.role_to_process["worker"].pid)
        for title, value, allowed in (("loading", own.peak_bytes, weights), ("serving", now, weights + kv_cache)):
            metric = f"{name}, private memory above importing, {title}"
            at_most = allowed / MIB + MEMORY_MARGIN_MIB
            yield limit(metric, (value - importing) / MIB, "MiB", at_most=at_most)


def take_turns(runs: Mapping[str, Run], num_repeats: int) -> dict[str, Figures]:
    """Run every side once per repeat; returns the best figures of each side."""
    samples: dict[str, list[Figures]] = {side: [] for side in runs}
    for _ in range(num_repeats):
        for side, run in runs.items():
            samples[side].append(run())
    return {
        side: {metric: best(metric, (sample[metric] for sample in its_samples)) for metric in its_samples[0]}
        for side, its_samples in samples.items()
    }


SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "formats": Bench.measure_formats,
    "long": Bench.measure_long,
    "large": Bench.measure_large,
}

if __name__ == "__main__":
    main()
