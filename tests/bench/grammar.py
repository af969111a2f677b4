"""The correctness and cost of grammar libraries: llguidance as we use it, against xgrammar.

    python -m tests.bench.grammar models/smollm2-135m-instruct --json grammar.json

Both compile every schema of the JSON Schema Test Suite. The grammars are checked against the suite's own values, and
three random texts are written for each grammar; complete ones must be valid under their schema. Each library runs in
its own process, xgrammar's in a virtual environment that the first run creates (minutes, 1 GB under .cache/). The
processes take turns, and figures are calibrated as in `tests.bench.scheduler`. A mask is a bitmap with one bit per
token.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from shared.model_files.model_dir import eos_token_ids
from tests.bench.parts.report import Row, compare, limit, report
from tests.bench.peers.turns import Turns

MODULES = {"ours": "llguidance_grammars", "xgrammar": "xgrammar_grammars"}
METRICS = {
    "taken_percent": "schemas that are taken",
    "good_percent": "values that fit: allowed",
    "bad_percent": "values that do not fit: allowed",
    "misfit_percent": "texts that end: without fitting",
}
TIMES = {"p50": "median", "mean": "mean", "p99": "99th percentile", "p100": "the longest"}


def main() -> None:
    """Measure, print the table, write the JSON."""
    args = _parse_args()
    num_repeats = 1 if args.quick else 5
    turns = Turns(MODULES, num_repeats)
    arguments = {"model_dir": str(args.model_dir), "eos_token_id": eos_token_ids(args.model_dir)[0]}
    with turns.start(*(["ours"] if args.without_peers else ["ours", "xgrammar"])) as processes:
        for process in processes:
            process.start("suite", **arguments)
        own, *others = turns.measure(*processes)
    rows = list(_rows(own, *others))
    print(f"{len(os.sched_getaffinity(0))} cores, {num_repeats} repeats")
    report(rows, args.json)


def _rows(own: Mapping[str, float], its: Mapping[str, float] | None = None) -> Iterator[Row]:
    for name, metric in METRICS.items():
        if name in ("bad_percent", "misfit_percent"):
            yield limit(metric, own[name], "%", at_most=0)
        else:
            yield Row(metric, own[name], "%")
        if its is not None:
            yield Row("  the same, xgrammar", its[name], "%")
    for what in ("compile", "mask"):
        for suffix, name in TIMES.items():
            value = own[f"{what}_{suffix}_us"]
            yield Row(f"{what}, {name}", value, "us")
            if its is not None:
                yield compare("  the same, xgrammar", its[f"{what}_{suffix}_us"], "us", reference=value)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, help="a model directory with a byte-level tokenizer")
    parser.add_argument("--quick", action="store_true", help="only one repeat")
    parser.add_argument("--without-peers", action="store_true", help="measure only ours; nothing is installed")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
