"""The sampling defaults in a model directory, and which of them prevent the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from services.worker.weights.sampling_defaults import (
    WITHOUT_EFFECT,
    SamplingDefaults,
    sampling_defaults,
    unknown_options,
)
from shared.model_files.model_dir import ModelDirectoryError
from shared.request.limits import ModelLimits

LIMITS = ModelLimits(context_length=100, logits_width=50, num_pool_tokens=100)


def read(model_dir: Path, config: object) -> SamplingDefaults:
    (model_dir / "generation_config.json").write_text(json.dumps(config))
    return sampling_defaults(model_dir, LIMITS)


def test_a_model_without_a_generation_configuration_has_no_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path, LIMITS) == SamplingDefaults()


def test_absent_and_null_values_have_no_default(tmp_path: Path) -> None:
    assert read(tmp_path, {"eos_token_id": 2, "top_p": None, "do_sample": True}) == SamplingDefaults()


def test_values_are_read_as_they_are_whatever_do_sample_says(tmp_path: Path) -> None:
    config = {
        "do_sample": False,
        "max_new_tokens": 2048,
        "temperature": 0.6,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0,
        "repetition_penalty": 1.1,
        "presence_penalty": 1.5,
        "frequency_penalty": -0.5,
        "num_beams": 4,
    }
    assert read(tmp_path, config) == SamplingDefaults(2048, 0.6, 50, 0.95, 0, 1.1, 1.5, -0.5)


@pytest.mark.parametrize(("value", "top_k"), [(-1, 0), (-1.0, 0), (0, 0), (20.0, 20), (50, 50), (51, 0)])
def test_a_top_k_that_keeps_every_token_is_off_and_may_be_written_as_a_float(
    tmp_path: Path, value: float, top_k: int
) -> None:
    assert read(tmp_path, {"top_k": value, "max_new_tokens": 64.0}) == SamplingDefaults(64, top_k=top_k)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", float("nan")),
        ("temperature", "0.6"),
        ("temperature", True),
        ("temperature", [0.6]),
        ("top_k", -2),
        ("top_k", 20.5),
        ("top_k", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 2),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", float("inf")),
    ],
)
def test_a_value_that_no_request_may_have_prevents_the_start(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelDirectoryError, match=rf"generation_config\.json: {name}"):
        read(tmp_path, {name: value})


@pytest.mark.parametrize("value", [0, -5, 1.5, "many"])
def test_a_maximum_of_zero_tokens_prevents_the_start(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ModelDirectoryError, match=r"generation_config\.json: max_"):
        read(tmp_path, {"max_new_tokens": value})


# transformers' options that change what is drawn, and that we do without.
NAMED = {
    *("bad_words_ids", "begin_suppress_tokens", "constraints", "dola_layers", "encoder_no_repeat_ngram_size"),
    *("encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty"),
    *("force_words_ids", "forced_bos_token_id", "forced_eos_token_id", "guidance_scale", "min_length"),
    *("min_new_tokens", "no_repeat_ngram_size", "penalty_alpha", "sequence_bias", "stop_strings"),
    *("suppress_tokens", "token_healing", "top_h", "typical_p", "watermarking_config"),
}


def test_options_that_are_done_without_are_found(tmp_path: Path) -> None:
    assert unknown_options(tmp_path) == []
    read(tmp_path, {"top_k": 20, "_from_model_config": True, "typical_p": None, **dict.fromkeys(WITHOUT_EFFECT, 1)})
    assert unknown_options(tmp_path) == []
    read(tmp_path, {"top_k": 20, "new_penalty": {"a": 1}, "no_repeat_ngram_size": 4})
    assert unknown_options(tmp_path) == ["new_penalty", "no_repeat_ngram_size"]


def test_every_option_of_transformers_is_read_known_or_done_without(tmp_path: Path) -> None:
    theirs = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    read(tmp_path, dict.fromkeys(theirs, 1))
    assert set(unknown_options(tmp_path)) - NAMED == set()
