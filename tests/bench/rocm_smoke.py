"""Checks the backend `aiter` on an AMD GPU: one command for an owner of one, who sends back its JSON.

    python -m tests.bench.rocm_smoke models/smollm2-135m-instruct --json rocm.json

compares every op that AITER computes with the reference backend, then the real model's tokens with those of `cpu`, and
times a decode step eagerly and from a graph. It needs torch for ROCm and AITER, which builds its kernels at their first
calls; that takes minutes, once.

Exit status: 0 if all that was compared is equal within bounds, 1 if not, 3 without a GPU that AITER has kernels for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from services.worker.config import WorkerSettings
from services.worker.device import DeviceError
from services.worker.models.loader import load_model
from services.worker.ops import load_ops
from services.worker.runner.model_runner import ModelRunner
from services.worker.runner.start.build import build_model_runner
from tests.bench.gpu.cases import Clock
from tests.bench.gpu.runners import BLOCK_SIZE, decode_ahead, enters
from tests.bench.parts.report import Row, limit, report
from tests.support.aiter.checks import CHECKS, TOLERANCE, Bench
from tests.support.models.paged_model import PagedModel
from tests.support.worker.worker_steps import decode_step, make_enter, prefill_step

NO_GPU = 3
TEXTS = (
    "Why is the sky blue? Answer in two sentences.",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived an old clockmaker who",
)
NUM_TOKENS = 32
# A token is right if its logit on the CPU is at most this much below the largest one.
TIE = 0.5
MAX_NUM_SEQS = 32
BATCH_SIZES = (1, 8, 32)
CONTEXT = 512
MAX_STEPS = 128
# As many as the largest batch has at the end of its steps.
NUM_BLOCKS = MAX_NUM_SEQS * (CONTEXT + 2 * MAX_STEPS) // BLOCK_SIZE


def main() -> int:
    """Compare and measure; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of the real model")
    parser.add_argument("--steps", type=int, default=64, help=f"decode steps measured, at most {MAX_STEPS}")
    parser.add_argument("--json", type=Path, help="write the rows here: the file to send back")
    args = parser.parse_args()
    if not 1 <= args.steps <= MAX_STEPS:
        parser.error(f"--steps must be between 1 and {MAX_STEPS}")
    try:
        if torch.version.hip is None or not torch.cuda.is_available():
            raise DeviceError("torch sees no AMD GPU")
        ops_bench = Bench(load_ops("aiter"), torch.device("cuda"))
    except DeviceError as error:
        print(f"nothing was checked: {error}", file=sys.stderr)
        return NO_GPU
    rows: list[Row] = []
    for row in measure(ops_bench, args.model, "cuda", num_steps=args.steps):
        rows.append(row)
        print(row.metric, row.value, row.unit, file=sys.stderr, flush=True)
    report(rows, args.json)
    return 1 if any(row.met is False for row in rows) else 0


def measure(bench: Bench, model_dir: Path, device: str, *, num_steps: int) -> Iterator[Row]:
    """Compare every op and the model's tokens, then time decode steps on a device of `WorkerSettings`."""
    for name, check in CHECKS.items():
        yield limit(f"{name}: difference", check(bench), "of largest", at_most=TOLERANCE)
    eager = make_runner(model_dir, device, is_eager=True)
    prompts = make_prompts(model_dir)
    yield limit("tokens eagerly: wrong", count_wrong(model_dir, prompts, generate(eager, prompts)), "tokens", at_most=0)
    yield from step_rows("eagerly", eager, num_steps)
    del eager
    graphs = make_runner(model_dir, device, is_eager=False)
    wrong = count_wrong(model_dir, prompts, generate(graphs, prompts))
    yield limit("tokens from graphs: wrong", wrong, "tokens", at_most=0)
    yield from step_rows("from a graph", graphs, num_steps)


def make_prompts(model_dir: Path) -> list[list[int]]:
    """The texts as token ids of the model."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


def make_runner(model_dir: Path, device: str, *, is_eager: bool) -> ModelRunner:
    """The model on the backend, in bfloat16."""
    settings = WorkerSettings.model_validate(
        {
            "model_dir": model_dir,
            "device": device,
            "ops_backend": "aiter",
            "enforce_eager": is_eager,
            "graph_batch_sizes": BATCH_SIZES,
            "kv_cache_num_blocks": NUM_BLOCKS,
        }
    )
    return build_model_runner(settings, lambda _: None)


def generate(runner: ModelRunner, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy completions of `NUM_TOKENS` tokens, in one batch."""
    attach(runner)
    most_blocks = -(-(max(map(len, prompts)) + NUM_TOKENS) // BLOCK_SIZE)
    batch = [
        make_enter(slot, prompt, range(slot * most_blocks, (slot + 1) * most_blocks))
        for slot, prompt in enumerate(prompts)
    ]
    steps = [runner.run_step(prefill_step(*batch)).token_ids.tolist()]
    steps += [runner.run_step(decode_step()).token_ids.tolist() for _ in range(NUM_TOKENS - 1)]
    return [list(tokens) for tokens in zip(*steps, strict=True)]


@torch.inference_mode()
def count_wrong(model_dir: Path, prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> int:
    """Tokens that `cpu` would not have chosen in float32 after the same tokens, nor almost."""
    ops = load_ops("cpu")
    paged = PagedModel(load_model(model_dir, ops, torch.float32, lambda _: None).model, ops)
    num_wrong = 0
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = paged.prefill_all(paged.add([*prompt, *completion]))[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(completion)[:, None])[:, 0]
        num_wrong += int((logits.amax(dim=-1) - chosen > TIE).sum())
    return num_wrong


def step_rows(kind: str, runner: ModelRunner, num_steps: int) -> Iterator[Row]:
    """The mean time of a decode step, each launched one ahead."""
    clock = Clock(runner.device)
    for batch_size in BATCH_SIZES:
        attach(runner)
        waiting = enters(CONTEXT, CONTEXT + 2 * num_steps)
        for _ in range(batch_size):
            runner.run_step(prefill_step(next(waiting)))
        decode_ahead(runner, 2)
        seconds = clock.seconds(lambda: decode_ahead(runner, num_steps)) / num_steps
        yield Row(f"decode step of {batch_size} {kind}", seconds * 1e3, "ms")


def attach(runner: ModelRunner) -> None:
    """Begin with an empty batch."""
    num_blocks = runner.attach(block_size=BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=2048)
    assert num_blocks, "no memory for the KV cache"


if __name__ == "__main__":
    sys.exit(main())
