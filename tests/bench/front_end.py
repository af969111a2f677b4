"""The cost per token of our tokenizer service against vLLM V1's front end: detokenise it and pass it to its request.

    python -m tests.bench.front_end models/smollm2-135m-instruct --json front_end.json

Both turn the bytes of one step's message, with one token for each of 512 requests, into a text per request; writing to
clients is not included. Ours parses `Exchange` outputs and updates the ledger of live requests; vLLM's decodes msgpack
and runs `OutputProcessor`. Each runs in its own process, vLLM's in a virtual environment that the first run creates
(minutes, 2 GB under .cache/). The processes take turns, and figures are calibrated as in `tests.bench.scheduler`. The
tokens are those of running text, and every text is checked.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tests.bench.parts.report import Row, compare, report
from tests.bench.peers.turns import Turns

MODULES = {"ours": "lockstep_front_end", "vllm": "vllm_front_end"}
SCENARIOS = (("ours", "detokenize"), ("vllm", "detokenize"), ("vllm", "detokenize_with_statistics"))
PEER_METRICS = ("  the same, vLLM V1", "  the same, vLLM V1 with its statistics")
NUM_SEQS = 512
TARGET = 6.0


def main() -> None:
    """Measure, print the table, write the JSON."""
    args = _parse_args()
    num_repeats, num_steps = (3, 32) if args.quick else (9, 64)
    turns = Turns(MODULES, num_repeats)
    arguments = {
        "model_dir": str(args.model_dir),
        "num_seqs": NUM_SEQS,
        "num_steps": num_steps,
        "num_repeats": num_repeats,
    }
    scenarios = SCENARIOS[:1] if args.without_peers else SCENARIOS
    with turns.start(*(name for name, _ in scenarios)) as processes:
        for process, (_, scenario) in zip(processes, scenarios, strict=True):
            process.start(scenario, **arguments)
        own_us, *peers_us = (figures["token_us"] for figures in turns.measure(*processes))
    rows = [Row("front end, a token", own_us, "us")]
    for metric, target, peer_us in zip(PEER_METRICS, (TARGET, None), peers_us, strict=False):
        rows.append(compare(metric, peer_us, "us", reference=own_us, at_least=target))
    print(f"{len(os.sched_getaffinity(0))} cores, {num_repeats} repeats, {NUM_SEQS} sequences")
    report(rows, args.json)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, help="a model directory with a tokenizer")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--without-peers", action="store_true", help="measure only ours; nothing is installed")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
