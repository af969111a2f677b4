"""How configurations of rotary embeddings are read, and what the tables do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.worker.layers.rope_scaling import (
    DynamicNtkScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    PlainRope,
    YarnScaling,
)
from services.worker.layers.rotary import RopeConfig, Rotary
from services.worker.ops import load_ops
from shared.model_files.model_dir import ModelDirectoryError

OPS = load_ops("reference")
POSITIONS = torch.arange(0, 300, dtype=torch.float32)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, RopeConfig(10000.0)),
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, RopeConfig(1e5)),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4}}, RopeConfig(1e6, LinearScaling(4.0))),
        (
            {"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 2}},
            RopeConfig(10000.0, DynamicNtkScaling(2.0, 2048)),
        ),
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
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 40,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "mscale": 1.0,
                    "mscale_all_dim": 0.5,
                    "original_max_position_embeddings": 4096,
                },
            },
            RopeConfig(10000.0, YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=0.5)),
        ),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "short_factor": [1, 1.5], "long_factor": [2.0, 30]},
            },
            RopeConfig(10000.0, LongRopeScaling((1.0, 1.5), (2.0, 30.0), 4096, factor=32.0)),
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": [1.0],
                    "long_factor": [2.0],
                    "original_max_position_embeddings": 2048,
                    "attention_factor": 1.25,
                    "factor": None,
                },
            },
            RopeConfig(10000.0, LongRopeScaling((1.0,), (2.0,), 2048, factor=64.0, given_attention_factor=1.25)),
        ),
        ({"partial_rotary_factor": 0.5}, RopeConfig(10000.0, PlainRope(), 0.5)),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, RopeConfig(10000.0, PlainRope(), 0.25)),
        ({"rope_theta": None, "rope_scaling": None, "partial_rotary_factor": None}, RopeConfig(10000.0)),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": None}}, RopeConfig(5e5)),
    ],
)
def test_rope_parameters_are_read_by_old_and_new_names(config: Mapping[str, Any], expected: RopeConfig) -> None:
    assert RopeConfig.from_json(config) == expected


def test_a_familys_defaults_apply_where_the_configuration_is_silent() -> None:
    assert RopeConfig.from_json({}, default_theta=150000.0, default_partial_factor=0.5) == RopeConfig(
        150000.0, PlainRope(), 0.5
    )
    named = {"rope_theta": 1e6, "rope_parameters": {"partial_rotary_factor": 1.0}}
    assert RopeConfig.from_json(named, default_theta=150000.0, default_partial_factor=0.5) == RopeConfig(1e6)


def test_what_a_scaling_replaces_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    read = RopeConfig.from_json(
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": linear}
    )
    assert read == RopeConfig(10000.0, LinearScaling(2.0))
    [record] = caplog.records
    assert (vars(record)["ignored"], vars(record)["used"]) == ({"rope_theta": 1e6}, {"rope_theta": 10000.0})
    RopeConfig.from_json({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {**linear, "rope_theta": 1e6}})
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", ["longrope2", "su", 7, None])
def test_an_unknown_rope_type_is_refused(kind: object) -> None:
    with pytest.raises(ModelDirectoryError, match=f"rope type {kind!r}: .*not supported"):
        RopeConfig.from_json({"rope_parameters": {"rope_type": kind, "factor": 2.0}})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": "much"}, "factor is 'much', not a number"),
        ({"rope_type": "linear", "factor": True}, "factor is True, not a number"),
        ({"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 0.5}, "mscale_all_dim is 0.5, which only yarn"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6', not a number"),
        ({"rope_type": ["yarn"]}, "not supported"),
        ("linear", "rope_parameters is 'linear', not an object"),
        ({"rope_type": "linear", "factor": 0}, "ZeroDivisionError|no rotation"),
        ({"rope_type": "linear", "factor": math.nan}, "no rotation"),
        ({"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings"),
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 64}, "factor"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}, "yarn"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        ({"partial_rotary_factor": 0}, "no rotation"),
        (["linear", 2.0], r"rope_parameters is \['linear', 2.0\], not an object"),
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, "by layer type"),
    ],
)
def test_parameters_that_describe_no_rotation_are_refused(parameters: object, message: str) -> None:
    with pytest.raises(ModelDirectoryError, match=message):
        RopeConfig.from_json({"rope_parameters": parameters})


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"short_factor": ...}, "short_factor"),
        ({"long_factor": None}, "long_factor is not a list"),
        ({"long_factor": []}, "long_factor is not a list"),
        ({"long_factor": "2.0"}, "long_factor is not a list"),
        ({"long_factor": [2.0] * 3}, "short_factor has 4 numbers, long_factor 3"),
        ({"long_factor": [2.0, 2.0, 0, 2.0]}, r"long_factor\[2\] is 0, not a finite number above 0"),
        ({"short_factor": [1.0, -1.0, 1.0, 1.0]}, r"short_factor\[1\] is -1.0, not a finite"),
        ({"short_factor": [math.nan, 1.0, 1.0, 1.0]}, r"short_factor\[0\] is nan, not a finite"),
        ({"long_factor": [1.0, 1.0, 1.0, math.inf]}, r"long_factor\[3\] is inf, not a finite"),
        ({"long_factor": [1.0, 1.0, 1.0, 1e39]}, r"long_factor\[3\] is 1e\+39, not a finite"),
        ({"long_factor": [1.0, 1.0, 1.0, 10**400]}, r"long_factor\[3\] is 1000*, not a finite"),
        ({"long_factor": [1.0, True, 1.0, 1.0]}, r"long_factor\[1\] is True, not a finite"),
        ({"long_factor": [1.0, "2", 1.0, 1.0]}, r"long_factor\[1\] is '2', not a finite"),
        ({"long_mscale": 1.2}, "long_mscale is 1.2, which is not supported"),
        ({"attention_factor": 0}, "no rotation"),
        ({"attention_factor": math.inf}, "no rotation"),
        ({"factor": math.nan}, "no rotation"),
        ({"factor": "32"}, "factor is '32', not a number"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0, must be at least 1"),
        ({"original_max_position_embeddings": 1}, "longrope"),
        ({"original_max_position_embeddings": -8}, "original_max_position_embeddings is -8, must be at least 1"),
        ({"original_max_position_embeddings": "64"}, "is '64', not a number"),
    ],
)
def test_malformed_factors_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    parameters = {**LONG, "original_max_position_embeddings": 64, **changes}
    parameters = {name: value for name, value in parameters.items() if value is not ...}
    with pytest.raises(ModelDirectoryError, match=message):
        RopeConfig.from_json({"max_position_embeddings": 256, "rope_parameters": parameters})


def test_factors_of_another_number_of_pairs_are_refused() -> None:
    rope = RopeConfig.from_json({"max_position_embeddings": 256, "rope_parameters": LONG})
    assert rope.rotary_dim(8) == 8
    for use in (lambda: rope.rotary_dim(16), lambda: Rotary(OPS, rope, 16, 256)):
        with pytest.raises(ModelDirectoryError, match="have 4 numbers, but 8 pairs of a head's columns are rotated"):
            use()


@pytest.mark.parametrize(("context", "is_long"), [(63, False), (64, False), (65, True), (256, True)])
def test_the_context_served_chooses_the_factors_of_all_positions(context: int, is_long: bool) -> None:
    parameters = {**LONG, "original_max_position_embeddings": 64}
    rope = RopeConfig.from_json({"max_position_embeddings": 256, "rope_parameters": parameters})
    rotary = Rotary(OPS, rope, 8, context)
    assert rotary.has_long_factors is is_long
    frequencies = 1.0 / ((2.0 if is_long else 1.0) * 10000.0 ** (torch.arange(0, 8, 2) / 8))
    assert rope.scaling.attention_factor == math.sqrt(1 + math.log(4) / math.log(64))
    expected = torch.outer(POSITIONS[:context], frequencies).cos() * rope.scaling.attention_factor
    heads = torch.zeros((context, 1, 8))
    heads[..., 0:4] = 1.0
    OPS.rope(heads, rotary.select(torch.arange(context)))
    torch.testing.assert_close(heads[:, 0, :4], expected, atol=1e-5, rtol=0)


def test_a_rotary_part_of_odd_size_is_refused() -> None:
    half = RopeConfig(10000.0, partial_rotary_factor=0.5)
    assert (half.rotary_dim(16), RopeConfig(10000.0).rotary_dim(16)) == (8, 16)
    for head_dim in (2, 6):
        with pytest.raises(ModelDirectoryError, match=f"{head_dim // 2} of a head's {head_dim} columns"):
            half.rotary_dim(head_dim)


def stretch(scaled: Tensor) -> Tensor:
    """The factor by which scaling slows each pair's rotation."""
    return PlainRope().angles(10000.0, 16, torch.ones(1))[0] / scaled[0]


def test_llama3_scaling_stretches_long_waves_only() -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=400)
    stretched = stretch(scaling.angles(10000.0, 16, torch.ones(1)))
    # Wavelengths: 6, 20, 63, then 199 between 400 / 4 and 400 / 1, then 628 and more.
    assert stretched[:3].tolist() == [1.0] * 3
    assert 1.0 < stretched[3] < 8.0
    torch.testing.assert_close(stretched[4:], torch.full((4,), 8.0))


@pytest.mark.parametrize("is_truncated", [True, False])
def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones(is_truncated: bool) -> None:
    scaling = YarnScaling(8.0, 1024, beta_fast=16.0, is_truncated=is_truncated)
    stretched = stretch(scaling.angles(10000.0, 16, torch.ones(1)))
    # Turns within 1024 positions: 163, 52, then 16.3 just above 16, 5.2, 1.6, then 0.52 and less.
    assert stretched[:2].tolist() == [1.0] * 2
    assert 1.0 < stretched[3] < stretched[4] < 8.0
    torch.testing.assert_close(stretched[5:], torch.full((3,), 8.0))


def test_yarn_sets_the_temperature_as_in_the_paper_or_in_the_checkpoint() -> None:
    paper = 0.1 * math.log(8.0) + 1
    assert YarnScaling(8.0, 64).attention_factor == pytest.approx(paper)
    assert YarnScaling(8.0, 64, given_attention_factor=1.5).attention_factor == 1.5
    assert YarnScaling(0.5, 64).attention_factor == 1.0
    both = YarnScaling(8.0, 64, mscale=1.0, mscale_all_dim=1.0)
    assert both.attention_factor == 1.0
    assert both.score_factor == pytest.approx(paper**2)
    assert RopeConfig(1e4, both).score_factor == both.score_factor
    assert RopeConfig(1e4).score_factor == 1.0


def yarn(**parameters: object) -> RopeConfig:
    """A configuration with YaRN."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
    return RopeConfig.from_json({"rope_scaling": rope | parameters})


def test_an_attn_factor_multiplies_yarns_own_factor() -> None:
    # As in DeepSeek-R1-0528-Qwen3-8B, where it cancels the paper's factor.
    assert yarn(attn_factor=0.8782488562869419).scaling.attention_factor == pytest.approx(1.0)
    latent = {"mscale": 1.0, "mscale_all_dim": 0.5}
    whole = yarn(**latent).scaling.attention_factor
    assert yarn(attn_factor=0.5, **latent).scaling.attention_factor == pytest.approx(whole / 2)
    assert yarn(attn_factor=0.5, **latent).score_factor == yarn(**latent).score_factor
    assert yarn(attn_factor=0.5, attention_factor=0.7).scaling.attention_factor == 0.7
    assert yarn(attn_factor=None, attention_factor=None) == yarn()
    assert yarn(attn_factor=1.0, extrapolation_factor=1.0, apply_yarn_scaling=True) == yarn()


@pytest.mark.parametrize("parameters", [{}, {"attention_factor": 0.8}, {"mscale": 1.0, "mscale_all_dim": 0.5}])
def test_yarns_attention_factor_equals_that_of_transformers(parameters: dict[str, float]) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e6}
    config = LlamaConfig(max_position_embeddings=2048, rope_parameters=rope | parameters)
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    read = RopeConfig.from_json({"max_position_embeddings": 2048, "rope_parameters": rope | parameters})
    assert read.scaling.attention_factor == pytest.approx(expected)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"attn_factor": "much"}, "much"),
        ({"attn_factor": 0.0}, "no rotation"),
        ({"attn_factor": math.nan}, "no rotation"),
        ({"attention_factor": math.inf}, "no rotation"),
        ({"attention_factor": -1.0}, "no rotation"),
        ({"extrapolation_factor": 0.5}, "extrapolation_factor is 0.5, only 1 is supported"),
        ({"apply_yarn_scaling": False}, "apply_yarn_scaling is False, only True"),
    ],
)
def test_unsupported_yarn_parameters_are_refused_by_name(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(ModelDirectoryError, match=message):
        yarn(**parameters)


def test_under_dynamic_ntk_a_token_is_rotated_as_if_it_were_the_last() -> None:
    scaling = DynamicNtkScaling(2.0, 100)
    angles = scaling.angles(10000.0, 16, POSITIONS)
    torch.testing.assert_close(angles[:100], PlainRope().angles(10000.0, 16, POSITIONS[:100]))
    # Alone or among others: only the position counts.
    torch.testing.assert_close(scaling.angles(10000.0, 16, POSITIONS[250:251]), angles[250:251])
    slowed = PlainRope().angles(10000.0, 16, POSITIONS)[100:, 1:] / angles[100:, 1:]
    assert bool((slowed[1:] > slowed[:-1]).all())
    assert bool((slowed[0] > 1).all())


def test_dynamic_ntk_extends_the_context_by_its_factor() -> None:
    assert RopeConfig(10000.0, DynamicNtkScaling(2.0, 100)).context_length(100) == 200
    assert RopeConfig(10000.0, LinearScaling(2.0)).context_length(100) == 100


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_scores_depend_only_on_the_distance_between_two_tokens(rotary_dim: int, is_interleaved: bool) -> None:
    rotary = Rotary(OPS, RopeConfig(10000.0), rotary_dim, 100, is_interleaved=is_interleaved)
    query, key = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def score(query_position: int, key_position: int) -> Tensor:
        heads = torch.cat((query, key))
        OPS.rope(heads, rotary.select(torch.tensor([query_position, key_position])))
        return heads[0, 0] @ heads[1, 0]

    torch.testing.assert_close(score(7, 3), score(94, 90), atol=1e-5, rtol=1e-5)
    assert not torch.isclose(score(7, 3), score(7, 4), atol=1e-3)
