"""What a start costs: processor and wall time of commands and of a cell's processes, beside imports that they need.

    python -m tests.bench.start models/smollm2-135m-instruct --json start.json

Every figure is the least of `--repeats` starts, and all are taken in turn, so that a busy minute does not change their
ratios. A cell has started when it says so; its first token is that of `lockstep generate`, which comes after. `--root`
is a checkout of another revision, with its stubs: its figures become the references.

Then a cell of a model of 1.1 billion random weights in int8 starts, cold and with its packed weights kept, and its
worker is killed: how long until it computes again, beside importing its modules and reading the packed file once, in
the same minute; and the same with a spare worker, whose processor time counts from when it takes the place. Each
process's stages end where its log says so; processor times are its own. Last, a decode step of that model in this
process, of weights from their packed file beside weights that were packed at the start.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from tests.bench.parts.report import Row, compare, report
from tests.bench.parts.run_python import run_python
from tests.bench.parts.worker_return import return_rows
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import ROOT, module_environment, python_command

FLOORS = ("pass", "import grpc", "import torch")
GRPC, TORCH = FLOORS[1:]
COMMANDS = ("lockstep --help", "lockstep generate")
TO_READY, TO_TOKEN = "lockstep serve, all processes", "lockstep serve to the first token"

Figures = dict[tuple[str, str], float]
"""By what was measured and the unit, in which "s" is wall time."""


def main() -> None:
    """Measure, print the table, write the JSON."""
    args = _parse_args()
    roots = [ROOT] if args.root is None else [ROOT, args.root.resolve()]
    least: list[Figures] = [{} for _ in roots]
    for _ in range(args.repeats):
        for root, figures in zip(roots, least, strict=True):
            for key, value in _measure(root, args.model_dir.resolve()):
                figures[key] = min(value, figures.get(key, value))
    rows = list(_rows(least))
    if args.returning_layers:
        rows += return_rows(args.returning_layers, args.repeats)
    sys.stdout.write(f"load average of the last minute: {os.getloadavg()[0]:.2f}\n")
    report(rows, args.json)


def _measure(root: Path, model_dir: Path) -> Iterator[tuple[tuple[str, str], float]]:
    for code in FLOORS:
        yield from _run(code, root, ["-c", code])
    yield from _run(COMMANDS[0], root, ["-m", "services.cli", "--help"])
    address = f"127.0.0.1:{free_port()}"
    command = python_command("-m", "services.cli", "serve", str(model_dir), f"--listen={address}")
    # As a user starts it, with HTTP, which an older revision does not serve by itself.
    command.append(f"--http-listen=127.0.0.1:{free_port()}")
    begun_at = time.monotonic()
    with subprocess.Popen(
        command, env=module_environment(root), cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as launcher:
        try:
            assert launcher.stdout is not None
            if not launcher.stdout.readline():
                raise SystemExit(f"error: the cell of {root} did not start")
            by_process: defaultdict[str, float] = defaultdict(float)
            for name, cpu_s in _cpu_by_process(psutil.Process(launcher.pid)):
                by_process[name] += cpu_s
            generate = ["-m", "services.cli", "generate", f"--target={address}", "--max-tokens=1", "Hello"]
            client = list(_run(COMMANDS[1], root, generate))
            to_token_s = time.monotonic() - begun_at
        finally:
            launcher.terminate()
            launcher.wait(PATIENCE_S)
    yield from client
    yield (TO_TOKEN, "s"), to_token_s
    yield (TO_READY, "CPU s"), sum(by_process.values())
    for name, cpu_s in by_process.items():
        yield (f"  {name}", "CPU s"), cpu_s


def _run(name: str, root: Path, args: Sequence[str]) -> Iterator[tuple[tuple[str, str], float]]:
    """What one process took."""
    wall_s, cpu_s = run_python(args, root)
    yield (name, "CPU s"), cpu_s
    yield (name, "s"), wall_s


def _cpu_by_process(launcher: psutil.Process) -> Iterator[tuple[str, float]]:
    """What the processes of a cell have used, those that have ended with what has started them."""
    for process in (launcher, *launcher.children(recursive=True)):
        times = process.cpu_times()
        name = next((part for part in process.cmdline() if part.startswith("services.")), "another process")
        yield name, times.user + times.system
        if ended_s := times.children_user + times.children_system:
            yield f"ended children of {name}", ended_s


def _rows(least: Sequence[Figures]) -> Iterator[Row]:
    figures, reference = least[0], least[-1]
    for (name, unit), value in figures.items():
        if len(least) > 1 and reference.get((name, unit)):
            goal = 0.5 if name == TO_READY else None
            yield compare(
                f"{name}, beside the other revision", value, unit, reference=reference[name, unit], at_most=goal
            )
        elif name in COMMANDS and unit == "CPU s":
            yield compare(f"{name}, beside `{GRPC}`", value, unit, reference=figures[GRPC, unit], at_most=3.0)
        elif name == TO_TOKEN:
            yield compare(f"{name}, beside `{TORCH}`", value, unit, reference=figures[TORCH, unit], at_most=1.5)
        else:
            yield Row(name, value, unit)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, help="a model directory")
    parser.add_argument("--root", type=Path, help="a checkout of another revision")
    parser.add_argument("--repeats", type=int, default=3, help="starts of each (default: %(default)s)")
    parser.add_argument(
        "--returning-layers", type=int, default=22, help="of the model whose worker is killed; 0 kills none"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
