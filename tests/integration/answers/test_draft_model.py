"""Drafts by a second model, through all three services: the same answers in fewer steps."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from lockstep.v1 import scheduler_pb2
from tests.support.cells.cell import REFERENCE, start_cell
from tests.support.clients.client import connect, token_request
from tests.support.models.generation import Way, generate
from tests.support.models.parity import load_paged
from tests.support.models.tiny_llama import write_noisy_copy, write_tiny_llama
from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import start_service

NUM_TOKENS = 41
# Chunked prompts in the same steps as decodes, and a pool that two prompts fill.
FLAGS = (
    REFERENCE,
    "--worker.num-threads=1",
    "--worker.kv-cache-num-blocks=14",
    "--scheduler.max-num-batched-tokens=32",
    "--scheduler.max-num-seqs=8",
    "--scheduler.enable-mixed-steps=true",
)


def make_prompts() -> list[list[int]]:
    """Prompts of various lengths, some with a common prefix so that blocks are shared."""
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 512) for _ in range(length)] for length in (1, 16, 33, 70)]
    return [*prompts, [*prompts[2], 9, 8, 7], [*prompts[3][:48], 5]]


def plain_tokens(model_dir: Path) -> list[list[int]]:
    """The greedy completions of the bare model without drafts, listed twice."""
    completions = generate(load_paged(model_dir, "reference"), make_prompts(), NUM_TOKENS, Way())
    return 2 * [each.completion for each in completions]


async def ask(model_dir: Path, *flags: str) -> tuple[list[list[int]], scheduler_pb2.GetStateResponse]:
    """Send all prompts at once, twice; returns the greedy completions and the scheduler's state."""
    requests = [token_request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in make_prompts()]
    with start_cell(model_dir, *FLAGS, *flags) as cell:
        async with connect(cell) as client:
            answers = [answer for _ in range(2) for answer in await asyncio.gather(*map(client.generate, requests))]
            state = await client.wait_until_idle()
    return [answer.token_ids for answer in answers], state


async def test_answers_do_not_depend_on_the_draft_model(tiny_model: Path, tmp_path: Path) -> None:
    noisy_dir = write_noisy_copy(tiny_model, tmp_path / "noisy")
    answers, state = await ask(tiny_model, f"--draft-model={noisy_dir}", "--worker.num-draft-tokens=8")
    assert answers == plain_tokens(tiny_model)
    assert state.num_preemptions > 0
    assert state.num_prefix_hit_tokens > 0
    assert 0 < state.num_accepted_draft_tokens < state.num_draft_tokens


@pytest.mark.slow
async def test_drafts_of_the_same_model_are_right_unless_cut_off(tiny_model: Path) -> None:
    answers, state = await ask(tiny_model, f"--draft-model={tiny_model}", "--draft-proposer=model")
    assert answers == plain_tokens(tiny_model)
    assert state.num_preemptions > 0
    # 40 tokens take 8 steps of 5, and some shorter ones.
    assert state.num_accepted_draft_tokens > 0.95 * state.num_draft_tokens
    assert state.num_accepted_draft_tokens > 0.6 * sum(map(len, answers))


def test_who_cannot_draft_is_refused_at_start(tiny_model: Path, tmp_path: Path) -> None:
    """The message for each reason is tested in `test_drafting.py`, and how a cell ends in `test_broken_models.py`."""
    other = write_tiny_llama(tmp_path / "other", changes={"vocab_size": 300})
    flags = (f"--model-dir={tiny_model}", "--draft-proposer=model", f"--draft-model={other}")
    with start_service("worker", *flags, f"--listen=unix:{tmp_path / 'worker'}", log=tmp_path / "log") as worker:
        assert worker.wait(PATIENCE_S) == 1
    assert "its vocabulary has 300 tokens, not 512" in (tmp_path / "log").read_text(encoding="utf-8")
