"""Models that make vectors: base classes of what is served; others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from shared.model_files.embedders import as_causal, headless_name, served_config
from shared.model_files.model_dir import ARCHITECTURES, ModelDirectoryError

CAUSAL = [name for name in ARCHITECTURES if name.endswith("ForCausalLM")]


@pytest.mark.parametrize("name", CAUSAL)
def test_a_base_class_is_read_as_the_model_whose_base_it_is(name: str) -> None:
    for base in (name.replace("ForCausalLM", "Model"), name.replace("ForCausalLM", "TextModel")):
        config = {"architectures": [base], "hidden_size": 8}
        assert served_config(config, "embed") == as_causal(config) == {"architectures": [name], "hidden_size": 8}
        with pytest.raises(ModelDirectoryError, match=f"{base} has no head.*--task embed"):
            served_config(config, "generate")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_whole_model_is_served_for_either(name: str) -> None:
    config = {"architectures": [name]}
    assert served_config(config, "embed") == served_config(config, "generate") == config


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification is a classifier"),
        ({"architectures": ["BertModel"]}, "BertModel is an encoder"),
        ({"architectures": ["XLMRobertaModel"]}, "XLMRobertaModel is an encoder"),
        ({"architectures": ["MPNetModel"]}, "MPNetModel is an encoder"),
        ({"architectures": ["ModernBertModel"]}, "ModernBertModel is an encoder"),
        ({"architectures": ["NomicBertModel"]}, "NomicBertModel is an encoder"),
        ({"architectures": ["NewModel"]}, "NewModel is an encoder"),
        ({"architectures": ["T5EncoderModel"]}, "T5EncoderModel is an encoder"),
        ({"architectures": ["LlamaBidirectionalModel"]}, "LlamaBidirectionalModel is an encoder"),
        ({"architectures": ["Qwen2Model"], "is_encoder_decoder": True}, "is an encoder"),
        ({"architectures": ["Qwen2ForCausalLM"], "is_causal": False}, "is_causal is false"),
        ({"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}, "use_bidirectional_attention is"),
        ({"architectures": ["GPT2Model"]}, "GPT2Model.*makes no vectors here"),
        ({"architectures": []}, "makes no vectors here"),
        ({}, "makes no vectors here"),
    ],
)
def test_what_makes_no_vectors_here_is_refused_by_name(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelDirectoryError, match=problem) as refused:
        served_config(config, "embed")
    assert "use sentence-transformers" in str(refused.value) or "those that do" in str(refused.value)


def test_tensors_of_a_base_class_have_no_prefix() -> None:
    assert headless_name("layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert headless_name("norm.weight") == "model.norm.weight"
    for name in ("model.norm.weight", "lm_head.weight"):
        assert headless_name(name) == name
