"""Recurrent layers beside transformers' in every division of a prompt, and over a long one."""

from __future__ import annotations

import pytest
import torch

from tests.support.models.generation import Generated, Way, generate
from tests.support.models.parity import SmallModel, TransformersModel, make_prompts, wrong_rows, wrong_tokens
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model

# Of a text that was taken out of its multimodal checkpoint, as transformers writes it.
ARCHITECTURE = "Qwen3_5ForCausalLM"
# Around the tiles of 64 tokens, within them and across several.
CHUNK_SIZES = (1, 7, 63, 64, 65, 200)
PROMPTS = make_prompts((201, 66))
[LONG_PROMPT] = make_prompts((1980,))
NUM_TOKENS = 4


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    values = SMALL_CONFIGS["Qwen3_5ForConditionalGeneration"]["plain"]
    model = build_model(ARCHITECTURE, {**values, "max_position_embeddings": 4096})
    directory = write_small_model(model, tmp_path_factory.mktemp("text"))
    return SmallModel(TransformersModel(model), directory)


@pytest.fixture(scope="module")
def exact(small: SmallModel) -> list[Generated]:
    """What the reference says of whole prompts."""
    return generate(small.load("reference"), PROMPTS, NUM_TOKENS, Way())


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("backend", ["cpu", "native"])
def test_a_prompt_in_chunks_says_what_transformers_says(small: SmallModel, backend: str, chunk_size: int) -> None:
    way = Way(chunk_size=chunk_size, is_mixed=chunk_size > 7)
    for each in generate(small.load(backend), PROMPTS, NUM_TOKENS, way):
        assert wrong_tokens(small.theirs, each.prompt, each.completion) == []
        tokens = each.prompt + each.completion
        assert wrong_rows(each.logits, small.theirs, tokens, first=len(each.prompt) - 1) == []


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_chunks_change_no_bit_of_the_reference(small: SmallModel, exact: list[Generated], chunk_size: int) -> None:
    """Elsewhere, each chunk of a prompt began with an empty state."""
    way = Way(chunk_size=chunk_size, is_mixed=chunk_size > 7)
    for each, whole in zip(generate(small.load("reference"), PROMPTS, NUM_TOKENS, way), exact, strict=True):
        assert each.completion == whole.completion
        assert torch.equal(each.logits, whole.logits)


@pytest.mark.parametrize("backend", ["cpu", "native", pytest.param("reference", marks=pytest.mark.slow)])
def test_a_long_prompt_says_what_transformers_says(small: SmallModel, backend: str) -> None:
    paged = small.load(backend)
    assert wrong_rows(paged.prefill_all(paged.add(LONG_PROMPT)), small.theirs, LONG_PROMPT) == []
