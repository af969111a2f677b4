"""The processor time of our front ends' writers, and of our whole front end beside vLLM's server.

    python -m tests.bench.http models/smollm2-135m-instruct --json http.json

Streams get one token per step, and every token is a piece of its own. Measured is the processor time of the server's
process, system calls included, from the bytes of a step's message to bytes on the clients' sockets, which are loopback
TCP; the clients are another process. A writer costs what is left after subtracting the same streams with a writer that
discards its responses. gRPC's streams share one connection, which is its cheapest form; HTTP's have one each.

vLLM's server is the one that `vllm serve` runs, with its engine replaced by messages from the same process; the first
run creates its environment (minutes, 2 GB under .cache/). The processes take turns, and figures in us are calibrated as
in `tests.bench.scheduler`; the times of first tokens are wall-clock times of clients, with nothing else running in the
service, by gRPC and HTTP in turn. Every text is checked.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.bench.parts.report import Row, compare, report
from tests.bench.peers.turns import Turns

MODULES = {"ours": "lockstep_http", "vllm": "vllm_http"}
# The contestant, its scenario and the kind of its clients, by name.
LOADS = {
    "discard": ("ours", "discard", "chat"),
    "grpc": ("ours", "streams", "grpc"),
    "chat": ("ours", "streams", "chat"),
    "completion": ("ours", "streams", "completion"),
    "vllm chat": ("vllm", "streams", "chat"),
    "vllm chat with statistics": ("vllm", "streams_with_statistics", "chat"),
}
WRITER_TARGET = 0.5
VLLM_TARGET = 4.0
# vLLM's target holds for this many streams.
TARGET_STREAMS = 64


def main() -> None:
    """Measure, print the table, write the JSON."""
    args = _parse_args()
    num_repeats = 3 if args.quick else args.repeats
    turns = Turns(MODULES, num_repeats)
    rows: list[Row] = []
    for num_streams in (4,) if args.quick else args.streams:
        figures = _measure_streams(turns, args, num_streams)
        rows += _writers(figures, num_streams) + _front_ends(figures, num_streams)
    rows += _first_tokens(turns, args)
    print(f"{len(os.sched_getaffinity(0))} cores, {num_repeats} repeats; load average {os.getloadavg()[0]:.0f}")
    report(rows, args.json)


def _measure_streams(turns: Turns, args: argparse.Namespace, num_streams: int) -> dict[str, float]:
    """Microseconds per token, by name."""
    names = [name for name, (contestant, *_) in LOADS.items() if contestant == "ours" or not args.without_peers]
    with turns.start(*(LOADS[name][0] for name in names)) as processes:
        for process, name in zip(processes, names, strict=True):
            print(f"{name}, {num_streams} streams …", file=sys.stderr)
            _, scenario, kind = LOADS[name]
            process.start(
                scenario,
                model_dir=str(args.model_dir),
                kind=kind,
                num_streams=num_streams,
                num_steps=8 if args.quick else 6400 // num_streams + 20,
                client_python=sys.executable,
            )
        measured = turns.measure(*processes)
    return {name: figures["token_us"] for name, figures in zip(names, measured, strict=True)}


def _writers(figures: dict[str, float], num_streams: int) -> list[Row]:
    base = figures["discard"]
    rows = [
        Row(f"{num_streams} streams: without a writer, a token", base, "us"),
        Row("  gRPC's writer, a piece", figures["grpc"] - base, "us"),
    ]
    return rows + [
        compare(
            f"  HTTP's writer, a piece of a {kind}",
            figures[kind] - base,
            "us",
            reference=figures["grpc"] - base,
            at_most=WRITER_TARGET,
        )
        for kind in ("chat", "completion")
    ]


def _front_ends(figures: dict[str, float], num_streams: int) -> list[Row]:
    rows = []
    for kind in ("chat", "completion"):
        rows.append(Row(f"  the whole front end, a token of a {kind}", figures[kind], "us"))
        for name in (f"vllm {kind}", f"vllm {kind} with statistics"):
            if name in figures:
                is_bound = num_streams == TARGET_STREAMS and name == f"vllm {kind}"
                metric = f"    the same, vLLM's server{name.removeprefix(f'vllm {kind}')}"
                at_least = VLLM_TARGET if is_bound else None
                rows.append(compare(metric, figures[name], "us", reference=figures[kind], at_least=at_least))
    return rows


def _first_tokens(turns: Turns, args: argparse.Namespace) -> list[Row]:
    with turns.start("ours") as processes:
        print("first tokens …", file=sys.stderr)
        figures = turns.measure_one(
            processes[0],
            "first_tokens",
            model_dir=str(args.model_dir),
            num_requests=10 if args.quick else 300,
            client_python=sys.executable,
        )
    rows = []
    for name in ("median", "p99"):
        own_ms, grpc_ms = figures[f"http_{name}_ms"], figures[f"grpc_{name}_ms"]
        rows += [
            compare(f"first token by HTTP, {name}", own_ms, "ms", reference=grpc_ms),
            Row("  added to gRPC's", own_ms - grpc_ms, "ms"),
        ]
    return rows


def _parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, help="a model directory with a tokenizer")
    parser.add_argument("--quick", action="store_true", help="a short run, whose figures mean nothing")
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[64, 512], help="numbers of streams (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=15, help="repeats of each load (default: %(default)s)")
    parser.add_argument("--without-peers", action="store_true", help="measure only ours; nothing is installed")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
