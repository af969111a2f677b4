"""Our cell on a CPU beside what users would pick instead: llama.cpp, OpenVINO GenAI, vLLM's CPU build, transformers.

    python -m tests.bench.cpu_peers models/smollm2-135m-instruct --json cpu_peers.json
    python -m tests.bench.cpu_peers models/smollm2-135m-instruct --formats int8 --serve-flag=--worker.num-threads=2
    python -m tests.bench.cpu_peers models/smollm2-135m-instruct --without-cell

Ours answers through all three services over gRPC. A peer is a library in one process, which gets the same prompts as
token ids. The first run makes the peers' environments and model files in .cache/: half an hour on two cores, 4 GB.
A peer that cannot be installed, or does not run here, is left out by name.

For each format of weights, our cell and its peers take turns, repeat by repeat; whoever does not compute is idle. A
load is a number of requests that start together: output tokens per second, with prefill; or one long prompt with one
output token. A figure is that of the best repeat, since other work on the machine only slows. The reference is the best
peer's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.bench.peers.cpu_cell import start_cell_engine
from tests.bench.peers.cpu_generation import Generate, Loads
from tests.bench.peers.cpu_peers import PEERS
from tests.bench.peers.environments import LeftOutError
from tests.bench.report import Row, compare, report

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Format:
    """How our cell stores weights.

    Attributes:
        flags: Of `lockstep serve`.
        peers: The keys in `PEERS` of those it is measured beside.
        throughput_targets: The least tokens/s relative to the best peer, by the number of requests.
        prefill_target: The longest prefill relative to the best peer.
        other_format: Another format of ours that is also measured.
        other_target: The least tokens/s relative to it, at 32 requests.
    """

    flags: tuple[str, ...]
    peers: tuple[str, ...]
    throughput_targets: Mapping[int, float]
    prefill_target: float
    other_format: str | None = None
    other_target: float | None = None


FORMATS = {
    "fp32": Format(("--worker.dtype=float32",), ("transformers",), {1: 2.0, 8: 2.0, 32: 2.0}, 1.0),
    "bf16": Format(("--worker.dtype=bfloat16",), ("vllm-bf16", "transformers"), {1: 1.2, 8: 1.2, 32: 1.0}, 1.0),
    "int8": Format(
        ("--worker.quantization=int8",),
        ("openvino-int8", "llama-cpp-q8_0", "vllm-w8a8"),
        {1: 1.2, 8: 1.3, 32: 1.3},
        0.6,
    ),
    "int4": Format(("--worker.quantization=int4",), ("llama-cpp-q4_0",), {1: 1.1, 8: 1.5, 32: 1.5}, 0.6, "int8", 0.85),
}
_COMPARED_REQUESTS = 32


def main() -> None:
    """Run the selected measurements, print the table, write the JSON."""
    args = _parse_args()
    bench = Bench(args)
    rows = [row for name in args.formats for row in bench.measure_format(name)]
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
    parser.add_argument("--without-cell", action="store_true", help="measure only the peers")
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
        left_out: Why each peer that was not measured was left out, by name.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.loads = Loads(args.requests, args.prompt_tokens, args.output_tokens, args.prefill)
        self.left_out = {
            PEERS[key].name: "not asked for"
            for name in args.formats
            for key in FORMATS[name].peers
            if key not in args.peers
        }
        self._args = args

    def measure_format(self, name: str) -> list[Row]:
        """Our cell beside the peers of one format."""
        print(f"{name} …", file=sys.stderr)
        form = FORMATS[name]
        with contextlib.ExitStack() as stack:
            runs: dict[str, Callable[[], Figures]] = {}
            for own in filter(None, (name, form.other_format)):
                if not self._args.without_cell:
                    runs[own] = stack.enter_context(self._start_cell(own)).run
            for key in form.peers:
                self._add_peer(stack, key, runs)
            figures = _take_turns(runs, self._args.repeats)
        return list(_rows(name, self.loads, figures))

    @contextlib.contextmanager
    def _start_cell(self, name: str) -> Iterator[Generate]:
        flags = (*FORMATS[name].flags, *self._args.serve_flag)
        with start_cell_engine(self._args.model_dir, *flags) as engine:
            yield Generate([engine], self.loads)

    def _add_peer(self, stack: contextlib.ExitStack, key: str, runs: dict[str, Callable[[], Figures]]) -> None:
        peer = PEERS[key]
        if peer.name in self.left_out:
            return
        try:
            process = stack.enter_context(peer.start(self._args.model_dir, self.loads))
        except LeftOutError as error:
            self.left_out[peer.name] = str(error)
        else:
            runs[peer.name] = lambda: process.run()[0]


def _take_turns(runs: Mapping[str, Callable[[], Figures]], num_repeats: int) -> dict[str, Figures]:
    """Run every side once per repeat; returns the best figures of each side."""
    samples: dict[str, list[Figures]] = {side: [] for side in runs}
    for _ in range(num_repeats):
        for side, run in runs.items():
            samples[side].append(run())
    return {
        side: {metric: _best(metric, (sample[metric] for sample in its_samples)) for metric in its_samples[0]}
        for side, its_samples in samples.items()
    }


def _best(metric: str, values: Iterable[float]) -> float:
    return min(values) if metric.endswith("_ms") else max(values)


def _rows(name: str, loads: Loads, side_to_figures: Mapping[str, Figures]) -> Iterator[Row]:
    form = FORMATS[name]
    for count in loads.requests:
        title = f"{name}, {count} requests"
        yield from _load_rows(title, str(count), name, side_to_figures, at_least=form.throughput_targets.get(count))
    if loads.num_prefill_tokens:
        title = f"{name}, prefill of {loads.num_prefill_tokens}"
        yield from _load_rows(title, "prefill_ms", name, side_to_figures, at_most=form.prefill_target)
    other = side_to_figures.get(form.other_format or "")
    if other is not None and _COMPARED_REQUESTS in loads.requests:
        value, reference = (its[str(_COMPARED_REQUESTS)] for its in (side_to_figures[name], other))
        title = f"{name}, {_COMPARED_REQUESTS} requests, beside our {form.other_format}"
        yield compare(title, value, "tokens/s", reference=reference, at_least=form.other_target)


def _load_rows(
    title: str, metric: str, own: str, side_to_figures: Mapping[str, Figures], **target: float | None
) -> Iterator[Row]:
    """Our figure beside that of the best peer, and then each peer's."""
    unit = "ms" if metric.endswith("_ms") else "tokens/s"
    peer_to_value = {side: its[metric] for side, its in side_to_figures.items() if side not in FORMATS}
    if own in side_to_figures:
        value = side_to_figures[own][metric]
        if peer_to_value:
            yield compare(title, value, unit, reference=_best(metric, peer_to_value.values()), **target)
        else:
            yield Row(title, value, unit)
    for peer, value in peer_to_value.items():
        yield Row(f"{title}, {peer}", value, unit)


if __name__ == "__main__":
    main()
