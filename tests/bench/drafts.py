"""The effect of n-gram drafts: tokens per step and tokens per second with and without them, on two kinds of text.

    python -m tests.bench.drafts models/smollm2-135m-instruct --json drafts.json

It runs the worker's model runner alone, in this process, on all cores. Repetitive text: code from this repository to be
edited and paragraphs of its README to be summarised, greedy. Other text: open questions, at temperature 1. A repeat
generates the same tokens without and with drafts, in alternating order; figures cover decode steps only, and are
medians over the repeats. Sequences enter together and leave when they are complete, so that with drafts the last ones
run in smaller batches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from services.worker.config import WorkerSettings
from services.worker.runner.model_runner import ModelRunner
from services.worker.runner.start.build import build_model_runner
from shared.step.step import EnteringSequence
from tests.bench.parts.report import Row, compare, print_table, write_json
from tests.support.system.processes import ROOT
from tests.support.worker.worker_steps import decode_step, make_enter, prefill_step

# The least gain in tokens per step, and in tokens per second, on repetitive text.
STEPS_TARGET = 1.5
REPEATING_RATE_TARGET = 1.0
# The least ratio of tokens per second on other text.
OTHER_RATE_TARGET = 0.95

BLOCK_SIZE = 16
MAX_TEXT_CHARACTERS = 1800

CODE_FILES = (
    "services/worker/process/signals.py",
    "services/worker/batch/block_tables.py",
    "services/worker/forward/kv_cache.py",
    "shared/process/lifecycle.py",
)
QUESTIONS = (
    "Why is the sky blue? Explain in detail.",
    "What were the main causes of the First World War?",
    "Describe the life of a medieval blacksmith.",
    "How does a refrigerator work?",
    "Write a letter to a friend about moving to a new city.",
    "Give advice for a job interview.",
    "What is the difference between weather and climate?",
    "Write a story about a robot who learns to paint.",
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of text: its prompts as tokens, and how it is sampled."""

    name: str
    prompts: list[list[int]]
    temperature: float
    repeats_itself: bool


@dataclass(frozen=True, slots=True)
class Run:
    """The cost of generating `num_tokens`: the rows of their sequences over all steps, drafted tokens, and time."""

    num_tokens: int
    num_rows: int
    num_draft_tokens: int
    decode_s: float

    @property
    def tokens_per_row(self) -> float:
        return self.num_tokens / self.num_rows

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.decode_s

    def __add__(self, other: Run) -> Run:
        return Run(
            self.num_tokens + other.num_tokens,
            self.num_rows + other.num_rows,
            self.num_draft_tokens + other.num_draft_tokens,
            self.decode_s + other.decode_s,
        )


def main() -> None:
    """Measure, print and write the figures."""
    arguments = _parse_arguments()
    flags = {"model_dir": arguments.model_dir, "num_draft_tokens": arguments.num_draft_tokens}
    plain, drafting = (
        build_model_runner(WorkerSettings(**flags, draft_proposer=proposer), lambda _: None)
        for proposer in ("none", "ngram")
    )
    rows: list[Row] = []
    for kind in _kinds(arguments.model_dir, arguments.num_prompts):
        for num_seqs in arguments.num_seqs:
            measured = list(_measure(plain, drafting, kind, num_seqs, arguments))
            print_table(measured)
            rows += measured
    if arguments.json:
        write_json(rows, arguments.json)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, help="the model directory")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 8], metavar="N", help="concurrent sequences")
    parser.add_argument("--num-prompts", type=int, metavar="N", help="prompts of each kind (default: all)")
    parser.add_argument("--num-tokens", type=int, default=128, metavar="N", help="tokens per answer")
    parser.add_argument(
        "--num-draft-tokens", type=int, default=4, metavar="N", help="the worker's setting of this name"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="pairs of runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    return parser.parse_args()


def _kinds(model_dir: Path, num_prompts: int | None) -> list[Kind]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def chat(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        token_ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return token_ids

    codes = [(ROOT / name).read_text(encoding="utf-8")[:MAX_TEXT_CHARACTERS] for name in CODE_FILES]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    texts = [readme[start : start + MAX_TEXT_CHARACTERS] for start in range(0, 4 * MAX_TEXT_CHARACTERS, 1800)]
    edit = "Rewrite this code with type hints removed. Give only the code.\n```python\n{}\n```"
    summary = "Summarize the following text in a few sentences:\n\n{}"
    return [
        Kind("code edit", [chat(edit.format(code)) for code in codes[:num_prompts]], 0.0, repeats_itself=True),
        Kind("summary", [chat(summary.format(text)) for text in texts[:num_prompts]], 0.0, repeats_itself=True),
        Kind("open question", [chat(question) for question in QUESTIONS[:num_prompts]], 1.0, repeats_itself=False),
    ]


def _measure(
    plain: ModelRunner, drafting: ModelRunner, kind: Kind, num_seqs: int, arguments: argparse.Namespace
) -> Iterator[Row]:
    """Run pairs; yields the kind's figures with drafts against those without."""
    pairs = []
    for repeat in range(arguments.repeats + 1):
        runs = {}
        for runner in (plain, drafting)[:: 1 if repeat % 2 else -1]:
            runs[runner] = _generate_all(runner, kind, num_seqs, arguments.num_tokens)
        # The first pair is a warm-up: kernels are compiled for each new number of tokens.
        if repeat:
            pairs.append((runs[plain], runs[drafting]))
    name = f"{kind.name}, {num_seqs} at once"
    without, with_drafts = pairs[0]
    yield compare(
        f"{name}: tokens a step",
        with_drafts.tokens_per_row,
        "tokens",
        reference=without.tokens_per_row,
        at_least=STEPS_TARGET if kind.repeats_itself else None,
    )
    accepted = with_drafts.num_tokens - with_drafts.num_rows
    yield Row(f"{name}: drafts accepted", 100 * accepted / max(with_drafts.num_draft_tokens, 1), "%")
    ratio = statistics.median(drafted.tokens_per_s / plain_run.tokens_per_s for plain_run, drafted in pairs)
    reference = statistics.median(plain_run.tokens_per_s for plain_run, _ in pairs)
    yield compare(
        f"{name}: tokens per second",
        ratio * reference,
        "tokens/s",
        reference=reference,
        at_least=REPEATING_RATE_TARGET if kind.repeats_itself else OTHER_RATE_TARGET,
    )


def _generate_all(runner: ModelRunner, kind: Kind, num_seqs: int, num_tokens: int) -> Run:
    """Generate for all prompts of a kind, `num_seqs` at a time; prompts are repeated if there are fewer."""
    prompts = kind.prompts * -(-num_seqs // len(kind.prompts))
    total = Run(0, 0, 0, 0.0)
    for first in range(0, len(prompts), num_seqs):
        total += _generate(runner, prompts[first : first + num_seqs], kind.temperature, num_tokens)
    return total


def _generate(runner: ModelRunner, prompts: Sequence[list[int]], temperature: float, num_tokens: int) -> Run:
    """Generate `num_tokens` after each prompt; counting begins with the second token."""
    runner.attach(block_size=BLOCK_SIZE, max_num_seqs=len(prompts), max_num_batched_tokens=16384)
    runner.run_step(prefill_step(*_enters(prompts, temperature, num_tokens)))
    num_left = np.full(len(prompts), num_tokens - 1)
    num_rows = num_draft_tokens = 0
    started = time.perf_counter()
    while len(rows := np.flatnonzero(num_left)):
        output = runner.run_step(decode_step(rows=rows.tolist()))
        num_left[rows] -= 1 if output.counts is None else output.counts
        num_rows += len(rows)
        num_draft_tokens += output.num_draft_tokens
    elapsed_s = time.perf_counter() - started
    return Run(len(prompts) * (num_tokens - 1), num_rows, num_draft_tokens, elapsed_s)


def _enters(prompts: Sequence[list[int]], temperature: float, num_tokens: int) -> Iterator[EnteringSequence]:
    """Yield all prompts as entering sequences, each with all the blocks it will need."""
    first_block = 0
    for slot, prompt in enumerate(prompts):
        num_blocks = -(-(len(prompt) + num_tokens) // BLOCK_SIZE)
        yield make_enter(
            slot,
            prompt,
            range(first_block, first_block + num_blocks),
            temperature=temperature,
            seed=slot,
            max_num_tokens=len(prompt) + num_tokens,
        )
        first_block += num_blocks


if __name__ == "__main__":
    main()
