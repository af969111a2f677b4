"""Our rotary embeddings against transformers' modules and functions, for every kind of scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, Glm4MoeConfig, GptOssConfig, LlamaConfig, PreTrainedConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3RotaryEmbedding,
    apply_rotary_pos_emb_interleave,
)
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb as apply_partial_rotary_pos_emb
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from services.worker.layers.rotary import RopeConfig, Rotary
from services.worker.ops import BACKEND_NAMES, Ops, load_ops

HEAD_DIM = 32
MAX_POSITIONS = 256
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}

PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": YARN,
    "yarn with its own range": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5},
    "yarn, not truncated": {**YARN, "truncate": False, "beta_fast": 8.0},
    "yarn with a given attention factor": {**YARN, "attention_factor": 1.3},
    "yarn with mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn with equal mscales": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    "yarn with the factor of the lengths": {**YARN, "factor": None},
}

every_backend = pytest.mark.parametrize("ops", [load_ops(name) for name in BACKEND_NAMES], ids=BACKEND_NAMES)


def heads(num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randn((num_tokens, 3, HEAD_DIM), generator=torch.Generator().manual_seed(seed))


def our_turn(ops: Ops, config: PreTrainedConfig, *, is_interleaved: bool = False) -> Tensor:
    """Heads at all positions, rotated according to the configuration that transformers saves."""
    rope = RopeConfig.from_json(config.to_dict())
    rotary = Rotary(ops, rope, rope.rotary_dim(HEAD_DIM), MAX_POSITIONS, is_interleaved=is_interleaved)
    turned = heads(MAX_POSITIONS)
    ops.rope(turned, rotary.select(torch.arange(MAX_POSITIONS)))
    return turned


def their_cos_sin(module: torch.nn.Module) -> tuple[Tensor, Tensor]:
    cos, sin = module(heads(MAX_POSITIONS), torch.arange(MAX_POSITIONS)[None])
    return cos, sin


def their_heads() -> Tensor:
    """In transformers' layout: [1, heads, tokens, columns]."""
    return heads(MAX_POSITIONS).transpose(0, 1)[None]


def assert_turned_alike(ours: Tensor, theirs: Tensor, *, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1), atol=tolerance, rtol=tolerance)


@every_backend
@pytest.mark.parametrize("kind", PARAMETERS)
def test_heads_turn_as_in_transformers(ops: Ops, kind: str) -> None:
    config = LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=MAX_POSITIONS, rope_parameters=PARAMETERS[kind])
    theirs, _ = apply_rotary_pos_emb(their_heads(), their_heads(), *their_cos_sin(LlamaRotaryEmbedding(config)))
    assert_turned_alike(our_turn(ops, config), theirs)


@every_backend
def test_the_first_half_of_glm4s_heads_turns_as_in_transformers(ops: Ops) -> None:
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = Glm4MoeConfig(head_dim=HEAD_DIM, max_position_embeddings=MAX_POSITIONS, rope_parameters=parameters)
    theirs, _ = apply_partial_rotary_pos_emb(
        their_heads(), their_heads(), *their_cos_sin(Glm4MoeRotaryEmbedding(config))
    )
    assert_turned_alike(our_turn(ops, config), theirs)


@every_backend
def test_gpt_oss_turns_its_heads_as_in_transformers(ops: Ops) -> None:
    parameters = {**YARN, "rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    config = GptOssConfig(head_dim=HEAD_DIM, max_position_embeddings=MAX_POSITIONS, rope_parameters=parameters)
    cos, sin = their_cos_sin(GptOssRotaryEmbedding(config))
    whole = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    assert_turned_alike(our_turn(ops, config), apply_rotary_pos_emb(their_heads(), their_heads(), *whole)[0])


@every_backend
def test_deepseeks_pairs_are_neighbours_as_in_transformers(ops: Ops) -> None:
    config = DeepseekV3Config(
        qk_rope_head_dim=HEAD_DIM, max_position_embeddings=MAX_POSITIONS, rope_parameters=PARAMETERS["yarn with mscale"]
    )
    theirs, _ = apply_rotary_pos_emb_interleave(
        their_heads(), their_heads(), *their_cos_sin(DeepseekV3RotaryEmbedding(config))
    )
    # transformers reorders the columns while rotating: first elements of all pairs, then second elements.
    ours = our_turn(ops, config, is_interleaved=True)
    ours = torch.cat((ours[..., 0::2], ours[..., 1::2]), dim=-1)
    assert_turned_alike(ours, theirs)


@every_backend
def test_dynamic_ntk_turns_a_growing_sequence_as_in_transformers(ops: Ops) -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    original = 64
    config = LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=original, rope_parameters=parameters)
    module = LlamaRotaryEmbedding(config)
    # A prompt within the original length, then token by token.
    prompt = module(heads(1), torch.arange(original)[None])
    steps = [module(heads(1), torch.tensor([[place]])) for place in range(original, MAX_POSITIONS)]
    cos, sin = (torch.cat(parts, dim=1) for parts in zip(prompt, *steps, strict=True))
    theirs, _ = apply_rotary_pos_emb(their_heads(), their_heads(), cos, sin)
    # Vectorized and scalar powers of the base differ in the last bit, which an angle of 256 multiplies.
    assert_turned_alike(our_turn(ops, config), theirs, tolerance=1e-4)
