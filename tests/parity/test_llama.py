"""Our Llama against transformers' in float32, and the `reference` backend's exactness, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from services.worker.loader import load_model
from services.worker.ops import load_ops
from tests.support.paged_model import PagedModel
from tests.support.tiny_llama import write_tiny_llama

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied embeddings": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "no head_dim, no grouping": {"head_dim": None, "num_key_value_heads": 4},
    "head_dim above hidden / heads": {"head_dim": 24},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}

# Short, long, shorter than a block, at a block's edge.
PROMPT_LENGTHS = (1, 5, 16, 17, 70, 64, 3, 130)


def make_prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(512) for _ in range(length)] for length in lengths]


def load_paged(model_dir: Path, backend: str, *, block_size: int = 16) -> PagedModel:
    ops = load_ops(backend)
    loaded = load_model(model_dir, ops, torch.float32, lambda _: None)
    return PagedModel(loaded.model, ops, num_blocks=2048 // block_size + 64, block_size=block_size)


def load_theirs(model_dir: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


@torch.no_grad()
def their_logits(model: LlamaForCausalLM, token_ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(tmp_path: Path, backend: str, variant: str) -> None:
    model_dir = write_tiny_llama(tmp_path, changes=VARIANTS[variant])
    ours, theirs = load_paged(model_dir, backend), load_theirs(model_dir)
    for prompt in make_prompts((1, 17, 70)):
        torch.testing.assert_close(
            ours.prefill_all(ours.add(prompt)), their_logits(theirs, prompt), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_greedy_completions_are_those_of_transformers(tiny_dir: Path, backend: str) -> None:
    ours, theirs = load_paged(tiny_dir, backend), load_theirs(tiny_dir)
    prompts = make_prompts()
    for prompt, completion in zip(prompts, ours.generate(prompts, 24), strict=True):
        logits = their_logits(theirs, prompt + completion)
        for place, token_id in enumerate(completion, start=len(prompt) - 1):
            # Equal, or a choice between two that float32 cannot tell apart.
            assert logits[place, token_id] >= logits[place].max() - 1e-3


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_cached_prefix_gives_the_logits_of_a_whole_prefill(tiny_dir: Path, backend: str) -> None:
    paged = load_paged(tiny_dir, backend)
    prefix = make_prompts((96,))[0]
    first = paged.add(prefix)
    paged.prefill([first])
    # One block hit, all but the last token hit, a prompt that shares nothing, and one longer than the prefix.
    prompts = [prefix[:17], prefix, make_prompts((40, 30))[1], prefix + make_prompts((600,))[0][:300]]
    alone = torch.cat([paged.prefill([paged.add(prompt)]) for prompt in prompts])
    sequences = [paged.add(prompt, prefix_of=first) for prompt in prompts]
    num_cached = [16 * paged.num_shared(sequence, first) for sequence in sequences]
    assert num_cached == [16, 80, 0, 96]
    torch.testing.assert_close(paged.prefill(sequences, num_cached), alone, atol=1e-4, rtol=1e-4)


def exact_logits(model_dir: Path, prompt: list[int]) -> Tensor:
    """What every other way must give: the whole prompt alone, block size 16, the logits of every token."""
    paged = load_paged(model_dir, "reference")
    return paged.prefill_all(paged.add(prompt))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_reference_gives_the_same_bits_however_a_row_is_computed(
    tiny_dir: Path, block_size: int, num_threads: int
) -> None:
    former = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        check_exactness(tiny_dir, block_size)
    finally:
        torch.set_num_threads(former)


def check_exactness(model_dir: Path, block_size: int) -> None:
    prompts = make_prompts()
    expected = [exact_logits(model_dir, prompt) for prompt in prompts]
    last = torch.stack([logits[-1] for logits in expected])
    for batch_size in (1, 3, 8):
        paged = load_paged(model_dir, "reference", block_size=block_size)
        for start in range(0, len(prompts), batch_size):
            batch = slice(start, start + batch_size)
            # All new tokens in one prefill.
            assert torch.equal(paged.prefill([paged.add(prompt) for prompt in prompts[batch]]), last[batch])
            # Behind a cached prefix: the same prompts again, all full blocks hit.
            cached = [paged.add(prompt) for prompt in prompts[batch]]
            paged.prefill(cached)
            again = [paged.add(seq.token_ids, prefix_of=seq) for seq in cached]
            num_cached = [block_size * paged.num_shared(seq, seq) for seq in cached]
            assert torch.equal(paged.prefill(again, num_cached), last[batch])
            # Token by token.
            decoded = [paged.add(prompt[:1]) for prompt in prompts[batch]]
            logits = dict(enumerate(paged.prefill(decoded)))
            while growing := [index for index, seq in enumerate(decoded) if seq.token_ids != prompts[batch][index]]:
                for index in growing:
                    decoded[index].token_ids.append(prompts[batch][index][len(decoded[index].token_ids)])
                rows = paged.decode([decoded[index] for index in growing])
                logits.update(zip(growing, rows, strict=True))
            assert torch.equal(torch.stack([logits[index] for index in range(len(decoded))]), last[batch])


@pytest.mark.parametrize("block_size", [1, 16])
def test_reference_gives_a_token_the_same_bits_in_a_run_of_any_length(tiny_dir: Path, block_size: int) -> None:
    draw = random.Random(block_size)
    prompts = make_prompts((60, 25, 40))
    expected = [exact_logits(tiny_dir, prompt) for prompt in prompts]
    paged = load_paged(tiny_dir, "reference", block_size=block_size)
    sequences = [paged.add(prompt[:10]) for prompt in prompts]
    paged.prefill(sequences)
    num_right = [10] * len(prompts)
    while rows := [index for index, prompt in enumerate(prompts) if num_right[index] < len(prompt)]:
        query_lens = []
        for index in rows:
            # A run: some right tokens, and wrong ones behind them that leave their keys and values in the cache.
            sequence, right = sequences[index], prompts[index][num_right[index] :][: draw.randint(1, 5)]
            wrong = [draw.randrange(512) for _ in range(draw.randint(0, 4))]
            sequence.token_ids = [*prompts[index][: num_right[index]], *right, *wrong]
            query_lens.append(len(right) + len(wrong))
            num_right[index] += len(right)
        logits = torch.split(paged.decode_runs([sequences[index] for index in rows], query_lens), query_lens)
        for index, run in zip(rows, logits, strict=True):
            first = len(sequences[index].token_ids) - len(run)
            assert torch.equal(run[: num_right[index] - first], expected[index][first : num_right[index]])
