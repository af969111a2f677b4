"""Measures the worker on a GPU, stage by stage.

    python -m tests.bench.gpu --pack .cache/gpu-pack --stages decode --budget-s 540 --json decode.json

    ops     each of our kernels beside torch's, and beside conch-triton-kernels' where those are installed
    tune    which of a few configurations of a kernel is the fastest, at the sizes that matter most
    decode  decode steps and prefills of dense models, beside the floor of the same device
    packed  models with experts, latents or packed weights, and the exact backend
    tokens  the real model's tokens, beside the CPU's
    trace   what the device does during a decode step, kernel by kernel
    start   how long a cell takes from its start until it serves
    serve   a cell under load, beside transformers' continuous batching and the same runner driven in process

Weights are random, except of the real model. Rows are written as they come, and no case begins that `--budget-s` may
not hold. With `--shapes tiny` every stage measures miniatures, which a CPU can.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# What the pack holds is imported below, when it has been installed.
from tests.bench.gpu.configs import CONFIGS
from tests.bench.gpu.unpack import has_base, run_unpacked
from tests.bench.parts.report import Row, print_table, write_json

STAGES = ("ops", "tune", "decode", "packed", "tokens", "trace", "start", "serve")
SHAPES = [shape for shape in CONFIGS if not shape.startswith("tiny-")]


def main() -> None:
    """Install the pack, then measure; rows go to stdout and to `--json`."""
    args = _parse_args()
    if args.pack is not None:
        run_unpacked(args.pack, sys.argv[1:])
    rows: list[Row] = []
    for row in _measure(args):
        rows.append(row)
        figures = {"metric": row.metric, "value": row.value, "unit": row.unit, "ratio": row.ratio, "met": row.met}
        print(json.dumps(figures), file=sys.stderr, flush=True)
        if args.json is not None:
            write_json(rows, args.json)
    print_table(rows)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, help="what `tests.bench.gpu.pack` made; installed beside itself, once")
    parser.add_argument("--stages", type=_stages, default=["decode"], help="separated by commas")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[], help="only these; `tiny`: miniatures")
    parser.add_argument("--model", type=Path, help="the real model's directory; by default the pack's")
    parser.add_argument("--enforce-eager", action="store_true", help="capture no graphs")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--kv-cache-gib", type=float, help="KV cache; by default what the device has left")
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    args = parser.parse_args()
    if args.pack is not None and not has_base(args.pack):
        parser.error(f"--pack {args.pack}: there is no {args.pack / 'base'}, which tests.bench.gpu.pack makes")
    if args.model is not None and not (args.model / "config.json").exists():
        parser.error(f"--model {args.model}: there is no config.json")
    return args


def _stages(text: str) -> list[str]:
    stages = text.split(",")
    if unknown := sorted(set(stages) - set(STAGES)):
        raise argparse.ArgumentTypeError(f"there is no stage {unknown[0]!r}; there are {', '.join(STAGES)}")
    return stages


def _measure(args: argparse.Namespace) -> Iterator[Row]:
    """Measure the device's rates, and then each stage."""
    if args.device == "cpu":
        # Before a kernel is imported: without a GPU they run in the interpreter.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    import torch

    from services.worker.device import DeviceRequest, choose_device
    from tests.bench.gpu.cases import Budget, Clock, ending_after, run_cases
    from tests.bench.gpu.runners import Bench, Options, measure_rates
    from tests.bench.gpu.stages import STAGES as STAGE_TO_CASES

    budget = Budget(args.budget_s)
    device = choose_device(DeviceRequest(args.device, 0, "auto")).device
    clock = Clock(device)
    rates = measure_rates(clock, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    yield Row(f"{name}: copy, bytes read and written", rates.bytes_per_s / 1e9, "GB/s")
    yield Row(f"{name}: matrix product", rates.operations_per_s / 1e12, "TFLOP/s")
    options = Options(tuple(args.shapes), args.device, args.kv_cache_gib, args.enforce_eager, args.model)
    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-") as folder:
        bench = Bench(options, Path(folder), device, clock, rates)
        for stage in args.stages:
            yield from run_cases(STAGE_TO_CASES[stage](bench), budget, ending_after)


if __name__ == "__main__":
    main()
