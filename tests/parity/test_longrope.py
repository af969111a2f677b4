"""LongRoPE against transformers, with contexts on both sides of the original one.

transformers chooses the factors by the length of a sequence. Ours belong to the context that is served, so that
transformers' choice is pinned to it here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.layers.context_limit import ContextLimit
from services.worker.models.loader import LoadedModel, LoadOptions, load_model
from services.worker.ops import load_ops
from services.worker.runner.numerics import numerics_fingerprint
from tests.support.models.generic_configs import GENERIC_CONFIGS
from tests.support.models.paged_model import PagedModel
from tests.support.models.parity import TransformersModel, make_prompts, wrong_rows
from tests.support.models.small_configs import CONTEXT_LENGTH, SMALL_CONFIGS, Config
from tests.support.models.small_models import build_model, write_small_model

ORIGINAL = 64
# Half of what each architecture rotates: plain, wide, partly rotated and latent heads; and with transformers' own code.
NUM_PAIRS = {
    "LlamaForCausalLM": 8,
    "Qwen3ForCausalLM": 16,
    "Glm4MoeForCausalLM": 4,
    "DeepseekV3ForCausalLM": 4,
    "Phi3ForCausalLM": 8,
}
CHANGES: dict[str, Config] = {
    "Qwen3ForCausalLM": {"head_dim": 32},
    # It has the number at the top, which comes before that of the rotation.
    "Phi3ForCausalLM": {"original_max_position_embeddings": ORIGINAL},
}


def longrope(num_pairs: int, **changes: object) -> Config:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.04 * pair for pair in range(num_pairs)],
        "long_factor": [1.0 + 2.5 * pair for pair in range(num_pairs)],
        "original_max_position_embeddings": ORIGINAL,
        **changes,
    }


def build(architecture: str, **changes: object) -> Any:
    plain = GENERIC_CONFIGS.get(architecture) or next(iter(SMALL_CONFIGS[architecture].values()))
    own = dict(plain.get("rope_parameters") or {})
    partial = {name: own[name] for name in ("partial_rotary_factor",) if name in own}
    rope = longrope(NUM_PAIRS[architecture], **partial, **changes)
    return build_model(architecture, {**plain, **CHANGES.get(architecture, {}), "rope_parameters": rope})


def pin(model: Any, *, is_long: bool) -> TransformersModel:
    """transformers' model with the same factors for all lengths."""
    rotary = model.model.rotary_emb
    with torch.no_grad():
        # It makes the long ones at the first sequence that needs them.
        rotary(torch.zeros(1), torch.arange(ORIGINAL + 1)[None])
    if is_long:
        rotary.original_inv_freq = rotary.long_inv_freq.clone()
    else:
        rotary.long_inv_freq = torch.tensor(rotary.original_inv_freq.tolist())
    return TransformersModel(model)


def load(directory: Path, context: int | None) -> LoadedModel:
    options = LoadOptions(context=ContextLimit(context))
    return load_model(directory, load_ops("cpu"), torch.float32, lambda _: None, options=options)


@pytest.mark.parametrize("context", [None, ORIGINAL + 1, ORIGINAL])
@pytest.mark.parametrize("architecture", NUM_PAIRS)
def test_all_sequences_have_the_factors_of_the_context_served(
    tmp_path: Path, architecture: str, context: int | None
) -> None:
    model = build(architecture)
    loaded = load(write_small_model(model, tmp_path), context)
    assert loaded.facts.context_length == (context or CONTEXT_LENGTH)
    theirs = pin(model, is_long=context != ORIGINAL)
    paged = PagedModel(loaded.model, load_ops("cpu"), num_blocks=64)
    lengths = [length for length in (1, 20, ORIGINAL - 1, ORIGINAL + 1, 150) if length <= (context or CONTEXT_LENGTH)]
    for prompt in make_prompts(lengths):
        assert wrong_rows(paged.prefill_all(paged.add(prompt)), theirs, prompt) == []


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM"])
@pytest.mark.parametrize("changes", [{"attention_factor": 1.3}, {"factor": 32.0}, {"factor": 1.0}], ids=str)
def test_cosines_are_scaled_as_in_transformers(tmp_path: Path, architecture: str, changes: Config) -> None:
    model = build(architecture, **changes)
    loaded = load(write_small_model(model, tmp_path), None)
    paged, (prompt,) = PagedModel(loaded.model, load_ops("cpu"), num_blocks=64), make_prompts((100,))
    assert wrong_rows(paged.prefill_all(paged.add(prompt)), TransformersModel(model), prompt) == []


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM"])
def test_the_choice_is_part_of_the_model_and_of_its_numerics(tmp_path: Path, architecture: str) -> None:
    directory = write_small_model(build(architecture), tmp_path)
    long, also_long, short, also_short = (load(directory, each) for each in (None, 100, ORIGINAL, 10))
    for digest in (
        lambda loaded: loaded.facts.weights_digest,
        lambda loaded: numerics_fingerprint(loaded, load_ops("reference")),
    ):
        assert digest(long) == digest(also_long) != digest(short) == digest(also_short)
