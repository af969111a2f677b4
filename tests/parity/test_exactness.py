"""Exact backends compute bitwise the same logits for a token in every batch: `reference` for every architecture."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from tests.support.kernels.interpreted_products import multiply_in_order
from tests.support.models.paged_model import PagedModel, PagedSequence
from tests.support.models.parity import SmallModel, SmallModels, make_prompts
from tests.support.models.small_configs import ARCHITECTURES, SMALL_CONFIGS, VOCABULARY_SIZE

# Shorter than a block, at a block boundary, longer than the small models' windows and selections.
PROMPT_LENGTHS = (1, 70, 16, 5, 33)
# Longer than a tile of the context, and than those windows and selections.
INTERPRETED_PROMPT_LENGTHS = (5, 40)
# Architectures in which threads share a matrix product, a sum or a search. Fast on idle cores, slow on busy ones.
THREADED = [
    "LlamaForCausalLM",
    *(pytest.param(f"{name}ForCausalLM", marks=pytest.mark.slow) for name in ("DeepseekV32", "GptOss")),
]


# In the interpreter a product takes milliseconds for every tile; the kernels have fast tests of their own.
INTERPRETED = [
    pytest.param("Qwen3ForCausalLM", marks=pytest.mark.slow),
    *(
        pytest.param(f"{name}ForCausalLM", marks=pytest.mark.proof)
        for name in ("DeepseekV32", "GptOss", "Qwen3Moe", "Qwen3Next")
    ),
]


BLOCK_SIZES = (1, 16, 32)


def exact_cases() -> list[object]:
    """Every configuration with every block size.

    `make test` has the common configuration of each architecture with one size, `make test-slow` another configuration.
    """
    cases: list[object] = []
    for turn, architecture in enumerate(ARCHITECTURES):
        for number, variant in enumerate(SMALL_CONFIGS[architecture]):
            for block_size in BLOCK_SIZES:
                is_its_turn = block_size == BLOCK_SIZES[(turn + number) % len(BLOCK_SIZES)]
                marks = {0: (), 1: (pytest.mark.slow,)}.get(number, (pytest.mark.proof,))
                marks = marks if is_its_turn else (pytest.mark.proof,)
                cases.append(pytest.param(architecture, variant, block_size, marks=marks))
    return cases


def exact_logits(small: SmallModel, prompts: list[list[int]], backend: str) -> list[Tensor]:
    """The expected logits of every token: each prompt computed whole and alone, in blocks of 16."""
    logits = []
    for prompt in prompts:
        paged = small.load(backend)
        logits.append(paged.prefill_all(paged.add(prompt)))
    return logits


@pytest.mark.parametrize(("architecture", "variant", "block_size"), exact_cases())
def test_a_row_has_the_same_bits_however_it_is_computed(
    small_models: SmallModels, architecture: str, variant: str, block_size: int
) -> None:
    check_exactness(small_models.get(architecture, variant), block_size)


@pytest.mark.parametrize("architecture", THREADED)
def test_threads_that_share_the_work_change_no_bits(small_models: SmallModels, architecture: str) -> None:
    # The single-thread fixture restores the earlier number.
    torch.set_num_threads(2)
    check_exactness(small_models.get(architecture, next(iter(SMALL_CONFIGS[architecture]))), 16)


@pytest.mark.parametrize("architecture", INTERPRETED)
def test_so_does_the_exact_backend_of_gpus_in_the_interpreter(
    small_models: SmallModels, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    multiply_in_order(monkeypatch)
    small = small_models.get(architecture, next(iter(SMALL_CONFIGS[architecture])))
    check_exactness(small, 3, backend="triton-exact", prompt_lengths=INTERPRETED_PROMPT_LENGTHS)


def check_exactness(
    small: SmallModel,
    block_size: int,
    *,
    backend: str = "reference",
    prompt_lengths: tuple[int, ...] = PROMPT_LENGTHS,
) -> None:
    """Compute prompts together, after cached prefixes and in chunks of all lengths, with this block size."""
    prompts = make_prompts(prompt_lengths)
    expected = exact_logits(small, prompts, backend)
    last = torch.stack([logits[-1] for logits in expected])
    paged = small.load(backend, block_size=block_size)
    together = [paged.add(prompt) for prompt in prompts]
    assert torch.equal(paged.prefill(together), last)
    again = [paged.add(prompt, prefix_of=seq) for prompt, seq in zip(prompts, together, strict=True)]
    num_cached = [block_size * paged.num_shared(seq, seq) for seq in again]
    assert any(num_cached) == (paged.states is None)
    assert torch.equal(paged.prefill(again, num_cached), last)
    check_runs(paged, prompts, expected)


def check_runs(paged: PagedModel, prompts: list[list[int]], expected: list[Tensor]) -> None:
    """Compute some sequences at a time in chunks of a few tokens, as decodes followed by wrong drafts."""
    draw = Random(5)
    sequences = [PagedSequence([]) for _ in prompts]
    num_right = [0] * len(prompts)
    while rows := [index for index, prompt in enumerate(prompts) if num_right[index] < len(prompt)]:
        rows = draw.sample(rows, k=draw.randint(1, len(rows)))
        query_lens, firsts = [], []
        for index in rows:
            first = num_right[index]
            right = prompts[index][first : first + draw.choice((1, 1, 3, 8))]
            # Wrong drafts leave their keys and values in the cache; a recurrent state could not go back.
            num_wrong = draw.choice((0, 2)) if paged.states is None else 0
            wrong = [draw.randrange(VOCABULARY_SIZE) for _ in range(num_wrong)]
            sequences[index].token_ids[first:] = [*right, *wrong]
            query_lens.append(len(right) + len(wrong))
            firsts.append(first)
            num_right[index] = first + len(right)
        logits = torch.split(paged.decode_runs([sequences[index] for index in rows], query_lens), query_lens)
        for index, first, run in zip(rows, firsts, logits, strict=True):
            assert torch.equal(run[: num_right[index] - first], expected[index][first : num_right[index]])
