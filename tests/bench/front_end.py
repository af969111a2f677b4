"""What a token costs our tokenizer service beside vLLM V1's front end: detokenised and handed to its request.

    python -m tests.bench.front_end models/smollm2-135m-instruct --json front_end.json

Both take the message of one step of 512 requests, a token each, from its bytes to a text for each request; writing
to clients is left out. Ours parses `Exchange` outputs and goes through the ledger of live requests; vLLM's decodes
msgpack and runs `OutputProcessor`. Each runs in a process of its own, vLLM's in a virtual environment that the first
run makes (minutes, 2 GB under .cache/). The processes take turns, and figures are calibrated as in
`tests.bench.scheduler`. The tokens are those of running text, and every text is checked.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tests.bench.peers.turns import Turns
from tests.bench.report import Row, compare, report

MODULES = {"ours": "lockstep_front_end", "vllm": "vllm_front_end"}
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
    with turns.start("ours", "vllm", "vllm") as (ours, plain, default):
        ours.start("detokenize", **arguments)
        plain.start("detokenize", **arguments)
        default.start("detokenize_with_statistics", **arguments)
        own_us, plain_us, default_us = (figures["token_us"] for figures in turns.measure(ours, plain, default))
    rows = [
        Row("front end, a token", own_us, "us"),
        compare("  the same, vLLM V1", plain_us, "us", reference=own_us, at_least=TARGET),
        compare("  the same, vLLM V1 with its statistics", default_us, "us", reference=own_us),
    ]
    print(f"{len(os.sched_getaffinity(0))} cores, {num_repeats} repeats, {NUM_SEQS} sequences")
    report(rows, args.json)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, help="a model directory with a tokenizer")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
