"""The layers on their own: what they compose out of ops, and what they read of a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.worker.forward_context import ForwardContext, forward_context, get_forward_context
from services.worker.kv_cache import KvCache, KvCacheSpec
from services.worker.layers.linear import Linear
from services.worker.layers.rotary import LinearScaling, Llama3Scaling, RopeConfig, Rotary
from services.worker.ops import load_ops
from services.worker.weights import ModelWeights, WeightFiles
from shared.model_dir import ModelDirectoryError
from tests.support.paged_model import attention_metadata

OPS = load_ops("cpu")


def make_context() -> ForwardContext:
    cache = KvCache(KvCacheSpec(1, 1, 2, torch.float32), num_blocks=1, block_size=4)
    metadata = attention_metadata([[0]], [1], [1], block_size=4, is_prefill=True)
    return ForwardContext.for_step(OPS, metadata, cache)


def test_contexts_nest_and_end() -> None:
    outer, inner = make_context(), make_context()
    with forward_context(outer):
        with forward_context(inner):
            assert get_forward_context() is inner
        assert get_forward_context() is outer
    with pytest.raises(AssertionError, match="outside"):
        get_forward_context()


def test_a_context_ends_when_its_body_fails() -> None:
    def fail() -> None:
        with forward_context(make_context()):
            raise RuntimeError("a kernel failed")

    with pytest.raises(RuntimeError, match="a kernel failed"):
        fail()
    with pytest.raises(AssertionError, match="outside"):
        get_forward_context()


def test_a_fused_linear_gives_the_outputs_side_by_side(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    names, sizes = ["q", "k"], [6, 3]
    tensors = {}
    for name, size in zip(names, sizes, strict=True):
        tensors[f"{name}.weight"] = torch.randn(size, 5, generator=generator)
        tensors[f"{name}.bias"] = torch.randn(size, generator=generator)
    save_file(tensors, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path) as files:
        linear = Linear.load(OPS, ModelWeights(files, torch.float32), names, sizes, in_features=5, has_bias=True)
    x = torch.randn(4, 5, generator=generator)
    expected = torch.cat([x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"] for name in names], dim=-1)
    torch.testing.assert_close(linear(x), expected)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, RopeConfig(10000.0, None)),
        ({"rope_theta": 5e5}, RopeConfig(5e5, None)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, RopeConfig(1e5, None)),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4}}, RopeConfig(1e6, LinearScaling(4.0))),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 32.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            RopeConfig(5e5, Llama3Scaling(32.0, 1.0, 4.0, 8192)),
        ),
    ],
)
def test_rope_parameters_are_read_by_old_and_new_names(config: Mapping[str, Any], expected: RopeConfig) -> None:
    assert RopeConfig.from_json(config) == expected


@pytest.mark.parametrize("kind", ["yarn", "longrope", "dynamic", 7])
def test_an_unknown_rope_type_is_refused(kind: object) -> None:
    with pytest.raises(ModelDirectoryError, match=f"rope type {kind!r}"):
        RopeConfig.from_json({"rope_parameters": {"rope_type": kind, "factor": 2.0}})


def test_llama3_scaling_stretches_long_waves_only() -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=1000)
    wavelengths = torch.tensor([10.0, 249.0, 400.0, 1001.0, 1e5])
    frequencies = 2 * math.pi / wavelengths
    stretched = frequencies / scaling.apply(frequencies)
    assert stretched[[0, 1]].tolist() == [1.0, 1.0]
    assert 1.0 < stretched[2] < 8.0
    torch.testing.assert_close(stretched[[3, 4]], torch.tensor([8.0, 8.0]))


def test_rotations_depend_on_the_distance_of_two_tokens_alone() -> None:
    rotary = Rotary(OPS, RopeConfig(10000.0, None), head_dim=8, max_positions=100)
    query, key = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def score(query_position: int, key_position: int) -> torch.Tensor:
        heads = torch.cat((query, key))
        OPS.rope(heads, rotary.select(torch.tensor([query_position, key_position])))
        return heads[0, 0] @ heads[1, 0]

    torch.testing.assert_close(score(7, 3), score(94, 90), atol=1e-5, rtol=1e-5)
    assert not torch.isclose(score(7, 3), score(7, 4), atol=1e-3)
