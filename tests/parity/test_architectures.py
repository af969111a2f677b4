"""Every architecture against transformers in float32: logits, and greedy tokens in every way of computing them.

`make test` and `make test-slow` together compute every configuration on one backend, every architecture on all of them,
and the ways of computing by pairs. `make proofs` has the products of configurations with backends and with ways; there
the backends include every set of instructions that this machine has.
"""

from __future__ import annotations

from typing import Any

import pytest

from services.worker.ops import BACKEND_NAMES
from tests.support.models.generation import Way, generate
from tests.support.models.parity import NATIVE_WITH_LESS, SmallModels, make_prompts, wrong_rows, wrong_tokens
from tests.support.models.small_configs import ARCHITECTURES, SMALL_CONFIGS
from tests.support.pairwise import pairwise_rows

NUM_TOKENS = 64
# Short, long, shorter than a block, at a block boundary, longer than sliding windows and token selections.
PROMPT_LENGTHS = (1, 70, 16, 5, 33, 100)
# Mixtures of experts of three kinds.
SLOW_ON_TRITON = ("Qwen3MoeForCausalLM", "GptOssForCausalLM", "Glm4MoeForCausalLM")
# The number of rows per architecture in `make test`.
NUM_FAST_ROWS = 2

WAY_FACTORS: dict[str, tuple[Any, ...]] = {
    "backend": BACKEND_NAMES,
    "block_size": (16, 1, 32),
    "prefill": ("whole", "chunks of 7", "chunks of 32", "chunks of 16 beside decodes"),
    "has_prefix": (False, True),
    "batch": ("all at once", "one by one"),
}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks of 7": {"chunk_size": 7},
    "chunks of 32": {"chunk_size": 32},
    "chunks of 16 beside decodes": {"chunk_size": 16, "is_mixed": True},
}


def logits_cases() -> list[Any]:
    """Every configuration on every backend; all but one backend of each, in turn, are left to `make proofs`."""
    return [
        pytest.param(
            architecture, variant, backend, marks=() if number % len(BACKEND_NAMES) == turn else pytest.mark.proof
        )
        for architecture in ARCHITECTURES
        for number, variant in enumerate(SMALL_CONFIGS[architecture])
        for turn, backend in enumerate((*BACKEND_NAMES, *NATIVE_WITH_LESS))
    ]


@pytest.mark.parametrize(("architecture", "variant", "backend"), logits_cases())
def test_logits_are_those_of_transformers(
    small_models: SmallModels, architecture: str, variant: str, backend: str
) -> None:
    small = small_models.get(architecture, variant)
    paged = small.load(backend)
    for prompt in make_prompts((1, 17, 90)):
        assert wrong_rows(paged.prefill_all(paged.add(prompt)), small.theirs, prompt) == []


def triton_cases() -> list[Any]:
    """Every configuration; all but a few are left to `make proofs`, since Triton's interpreter is slow."""
    cases = []
    for architecture in ARCHITECTURES:
        for number, variant in enumerate(SMALL_CONFIGS[architecture]):
            is_chosen = architecture in SLOW_ON_TRITON and number == 0
            mark = pytest.mark.slow if is_chosen else pytest.mark.proof
            cases.append(pytest.param(architecture, variant, marks=mark))
    return cases


@pytest.mark.parametrize(("architecture", "variant"), triton_cases())
def test_logits_on_triton_are_those_of_transformers(small_models: SmallModels, architecture: str, variant: str) -> None:
    small = small_models.get(architecture, variant)
    paged, (prompt,) = small.load("triton"), make_prompts((20,))
    assert wrong_rows(paged.prefill_all(paged.add(prompt)), small.theirs, prompt) == []


def greedy_cases() -> list[Any]:
    """Pairs of the ways, each with the next configuration; with the configuration as one more factor a proof.

    `make test` has the first few, `make test-slow` every third of the others.
    """
    cases = []
    for architecture in ARCHITECTURES:
        variants = tuple(SMALL_CONFIGS[architecture])
        ways = pairwise_rows(WAY_FACTORS, seed=1)
        assert len(ways) >= len(variants)
        rows = [{"variant": variants[number % len(variants)], **way} for number, way in enumerate(ways)]
        later = (pytest.mark.slow, pytest.mark.proof, pytest.mark.proof)
        marks = [()] * NUM_FAST_ROWS + [later[number % 3] for number in range(len(rows) - NUM_FAST_ROWS)]
        cases += [greedy_case(architecture, *each) for each in zip(rows, marks, strict=True)]
        backends = (*BACKEND_NAMES, *NATIVE_WITH_LESS)
        rows = pairwise_rows({"variant": variants, **WAY_FACTORS, "backend": backends}, seed=1)
        cases += [greedy_case(architecture, row, pytest.mark.proof, prefix="proof-") for row in rows]
    return cases


def greedy_case(architecture: str, row: dict[str, Any], marks: Any, *, prefix: str = "") -> Any:
    return pytest.param(architecture, row, marks=marks, id=f"{prefix}{architecture}-{_name(row)}")


def _name(row: dict[str, Any]) -> str:
    prefix = "prefix" if row["has_prefix"] else "no prefix"
    parts = (row["variant"], row["backend"], f"blocks of {row['block_size']}", row["prefill"], prefix, row["batch"])
    return "-".join(parts).replace(" ", "-")


@pytest.mark.parametrize(("architecture", "row"), greedy_cases())
def test_greedy_tokens_are_those_of_transformers(
    small_models: SmallModels, architecture: str, row: dict[str, Any]
) -> None:
    small = small_models.get(architecture, row["variant"])
    way = Way(block_size=row["block_size"], has_prefix=row["has_prefix"], **WAYS[row["prefill"]])
    paged = small.load(row["backend"], block_size=way.block_size)
    prompts = make_prompts(PROMPT_LENGTHS)
    batches = [prompts] if row["batch"] == "all at once" else [[prompt] for prompt in prompts[:2]]
    for batch in batches:
        for each in generate(paged, batch, NUM_TOKENS, way):
            assert len(each.completion) == NUM_TOKENS
            assert wrong_tokens(small.theirs, each.prompt, each.completion) == []
            tokens = each.prompt + each.completion
            assert wrong_rows(each.logits, small.theirs, tokens, first=len(each.prompt) - 1) == []
