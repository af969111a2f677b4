"""The cost of a scheduler's step at two revisions of this project: plain decodes, churn, or an admission.

    python -m tests.bench.revisions 5454b94 HEAD
    python -m tests.bench.revisions main HEAD --pairs 21 --json revisions.json
    python -m tests.bench.revisions main HEAD --scenario churn

Both run our engine as `tests.bench.scheduler` does, in processes that take turns: pairs of repeats, each scaled by the
machine's speed at that moment. The ratio is the median over the pairs. A revision is checked out under .cache/ with its
own stubs, and runs with the packages installed here. Revisions before 5454b94 lack the benchmark.
"""

from __future__ import annotations

import argparse
import io
import statistics
import subprocess
import sys
import sysconfig
import tarfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.bench.parts.report import Row, limit, report
from tests.bench.peers.protocol import ROOT, start_process

NUM_SEQS = 512
NUM_STEPS = 256
# The most that a step may cost at the later revision, relative to the earlier one.
TARGET = 1.05
_NUM_PROMPT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class _Scenario:
    label: str
    name: str
    """As `tests.bench.peers.lockstep` knows it."""
    figure: str
    arguments: dict[str, object]
    """Without those that depend on the number of repeats."""


_SCENARIOS = {
    "decode": _Scenario(
        f"decode step, {NUM_SEQS} sequences",
        "decode",
        "step_us",
        {"num_seqs": NUM_SEQS, "block_size": 16, "num_prompt_tokens": _NUM_PROMPT_TOKENS, "num_steps": NUM_STEPS},
    ),
    "churn": _Scenario(
        f"{NUM_SEQS} tokens with churn",
        "churn",
        "tokens_512_us",
        {
            "num_seqs": NUM_SEQS,
            "block_size": 16,
            "num_prompt_tokens": _NUM_PROMPT_TOKENS,
            "mean_output_tokens": 200,
            "num_steps": NUM_STEPS,
        },
    ),
    "admission": _Scenario(
        "admission, 8k, cold",
        "admission",
        "cold_us",
        {"num_prompt_tokens": 8192, "block_size": 16, "num_prompts": 8},
    ),
}


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="a git revision")
    parser.add_argument("after", help="a later git revision")
    parser.add_argument("--scenario", choices=_SCENARIOS, default="decode")
    parser.add_argument("--pairs", type=int, default=11, help="pairs of repeats")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    scenario = _SCENARIOS[args.scenario]
    pairs = _measure([_checkout(args.before), _checkout(args.after)], scenario, args.pairs)
    rows = [
        Row(
            f"{scenario.label}, at {args.before}",
            statistics.median(before for before, _ in pairs),
            "us",
        ),
        Row(f"the same, at {args.after}", statistics.median(after for _, after in pairs), "us"),
        limit(
            "the later by the earlier", statistics.median(after / before for before, after in pairs), "", at_most=TARGET
        ),
    ]
    report(rows, args.json)


def _checkout(revision: str) -> Path:
    commit = _git("rev-parse", "--verify", f"{revision}^{{commit}}").decode().strip()
    directory = ROOT / ".cache" / "revisions" / commit
    if not directory.exists():
        with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as archive:
            archive.extractall(directory, filter="data")
        protos = [str(path.relative_to(directory)) for path in (directory / "protos").rglob("*.proto")]
        out = [f"--{kind}_out=protos" for kind in ("python", "grpc_python")]
        command = [sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", f"-I{sysconfig.get_path('purelib')}"]
        subprocess.run([*command, *out, *protos], cwd=directory, check=True)
    return directory


def _measure(directories: list[Path], scenario: _Scenario, num_pairs: int) -> list[tuple[float, float]]:
    """Processor time at the two revisions, scaled to the same machine speed, one tuple per pair."""
    arguments = dict(scenario.arguments)
    if scenario.name != "churn":
        arguments["num_repeats"] = num_pairs + 1
    with ExitStack() as stack:
        before, after = [
            stack.enter_context(start_process(path.name, sys.executable, "tests.bench.peers.lockstep", root=path))
            for path in directories
        ]
        for process in (before, after):
            process.start(scenario.name, **arguments)
            process.run()
        # The order alternates from pair to pair.
        orders = [(before, after), (after, before)]
        measured = [{process: process.run() for process in orders[pair % 2]} for pair in range(num_pairs)]
    best_us = min(calibration_us for pair in measured for _, calibration_us in pair.values())

    def scaled(figures: dict[str, float], calibration_us: float) -> float:
        return figures[scenario.figure] * best_us / calibration_us

    return [(scaled(*pair[before]), scaled(*pair[after])) for pair in measured]


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


if __name__ == "__main__":
    main()
