"""What llama.cpp's converter and quantiser write of every architecture that we serve: it is imported and computes the
same, or it is refused for a reason given here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM

from services.worker.weights.gguf_import.conversion import UnimportableError, convert
from shared.model_files.model_dir import CONFIG, TOKENIZER, WEIGHTS
from tests.support.models.parity import TransformersModel, load_paged, make_prompts, wrong_rows
from tests.support.models.small_configs import SMALL_CONFIGS, VOCABULARY_SIZE
from tests.support.models.small_models import build_model, write_small_model
from tests.support.writers.llama_cpp import call_library, run_converter

pytestmark = pytest.mark.writers

Case = tuple[str, str]


# What the converter refuses, by a part of what it says.
UNWRITTEN: dict[str, str] = {
    "MinistralForCausalLM": "exit 1",
    "Kimi_K25ForConditionalGeneration": "exit 1",
}
UNWRITTEN_VARIANTS: dict[Case, str] = {
    (architecture, variant): "Can not map tensor"
    for architecture, variants in {
        "Qwen3MoeForCausalLM": ["sparse-every-other-layer", "dense-first-layer"],
        "Qwen3NextForCausalLM": ["wide-heads-dense-layers", "half-rotary-large-eps"],
        "Qwen3VLMoeForConditionalGeneration": ["sparse-every-other-layer-tied"],
    }.items()
    for variant in variants
}
_BIASES = "unexpected tensors: .*bias"
_MIXED_LAYERS = r"lacks tensors: blk\.0\.ffn_down\.weight"
# What it writes and we refuse. No published model has biases there, or dense layers after mixtures.
REFUSED: dict[Case, str] = {
    ("DeepseekV2ForCausalLM", "biases"): _BIASES,
    ("DeepseekV32ForCausalLM", "biases"): _BIASES,
    ("DeepseekV3ForCausalLM", "biases-tied"): _BIASES,
    ("Gemma3ForCausalLM", "untied-biases"): _BIASES,
    ("GlmMoeDsaForCausalLM", "groups-biases"): _BIASES,
    ("LlamaForCausalLM", "biases"): _BIASES,
    ("Qwen3ForCausalLM", "biases"): _BIASES,
    ("Qwen3MoeForCausalLM", "biases-wide-heads"): _BIASES,
    ("Qwen3NextForCausalLM", "layer-types-tied-biases"): _BIASES,
    ("Qwen3VLForConditionalGeneration", "tied-biases"): _BIASES,
    ("Qwen3_5ForConditionalGeneration", "layer-types-large-eps"): _BIASES,
    ("Qwen3_5MoeForConditionalGeneration", "layer-types-large-eps"): _BIASES,
    ("DeepseekV32ForCausalLM", "layer-mix"): _MIXED_LAYERS,
    ("Glm4MoeLiteForCausalLM", "layer-mix-biases"): _MIXED_LAYERS,
    ("GlmMoeDsaForCausalLM", "layer-mix-yarn-rope"): _MIXED_LAYERS,
}
_WINDOWS = "GGUF has no windows for it"
_RENORMALISED = "llama.cpp always renormalises its experts' weights"
_MSCALE = "GGUF has one of the two temperatures"
_INTERLEAVED = "GGUF has no key for a rotation by halves"
_PATTERN = "llama.cpp knows one pattern of windows"
# What the file does not say, so that llama.cpp computes otherwise too.
LOST: dict[Case, str] = {
    ("DeepseekV2ForCausalLM", "yarn-rope"): _MSCALE,
    ("DeepseekV3ForCausalLM", "half-split-rope"): _INTERLEAVED,
    ("DeepseekV3ForCausalLM", "yarn-rope"): _MSCALE,
    ("DeepseekV32ForCausalLM", "yarn-rope"): _MSCALE,
    ("Glm4MoeLiteForCausalLM", "half-split-rope"): _INTERLEAVED,
    ("Glm4MoeLiteForCausalLM", "yarn-rope-large-eps-tied"): _MSCALE,
    **{
        ("Gemma3ForCausalLM", variant): _PATTERN
        for variant in ("plain", "wide-heads-linear-rope", "layer-types-yarn-rope", "full-layers-only-large-eps")
    },
    ("Gemma3ForConditionalGeneration", "plain"): _PATTERN,
    ("Gemma3ForConditionalGeneration", "layer-types-yarn-rope"): _PATTERN,
    ("GptOssForCausalLM", "full-layers-only"): _PATTERN,
    ("GptOssForCausalLM", "sliding-layers-only"): _PATTERN,
    ("GptOssForCausalLM", "tight-clamp"): "GGUF has no key for the bound of activations",
    ("Ministral3ForCausalLM", "window-large-eps"): _WINDOWS,
    ("Mistral3ForConditionalGeneration", "mistral-tied-large-eps"): _WINDOWS,
    **{
        ("MistralForCausalLM", variant): _WINDOWS
        for variant, values in SMALL_CONFIGS["MistralForCausalLM"].items()
        if values["sliding_window"] is not None
    },
    ("MixtralForCausalLM", "window"): _WINDOWS,
    ("Qwen2ForCausalLM", "layer-types"): _WINDOWS,
    ("Qwen2ForCausalLM", "windows-in-later-layers"): _WINDOWS,
    ("Qwen2VLForConditionalGeneration", "windows-in-later-layers-large-eps"): _WINDOWS,
    ("Qwen2_5_VLForConditionalGeneration", "windows-in-later-layers-large-eps"): _WINDOWS,
    ("Qwen3ForCausalLM", "windows-in-later-layers"): _WINDOWS,
    **{
        ("Qwen3MoeForCausalLM", variant): _RENORMALISED
        for variant in ("plain", "many-experts", "window", "yarn-rope-large-eps")
    },
}
# Keys of published configurations that transformers does not write.
PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"scoring_func": "softmax"},
    "DeepseekV3ForCausalLM": {"scoring_func": "sigmoid"},
    "DeepseekV32ForCausalLM": {"scoring_func": "sigmoid"},
}
# Files without the layers that draft, which small models lack.
FLAGS: dict[str, list[str]] = {
    "Qwen3NextForCausalLM": ["--no-mtp"],
    "Qwen3_5ForConditionalGeneration": ["--no-mtp"],
    "Qwen3_5MoeForConditionalGeneration": ["--no-mtp"],
}


@dataclass(frozen=True)
class Written:
    """A small model, and the file that the converter made of it."""

    theirs: TransformersModel
    path: Path
    said: str | None


def make_checkpoint(case: Case, directory: Path) -> TransformersModel:
    architecture, variant = case
    values = dict(SMALL_CONFIGS[architecture][variant])
    if architecture.startswith("Gemma3"):
        # GGUF has no key for the number that scales queries.
        values["query_pre_attn_scalar"] = values["head_dim"]
    model = build_model(architecture, values)
    write_small_model(model, directory)
    write_as_published(architecture, directory)
    return TransformersModel(model)


def write_as_published(architecture: str, directory: Path) -> None:
    config = json.loads((directory / CONFIG).read_text())
    config.get("text_config", config).update(PUBLISHED.get(architecture, {}))
    (directory / CONFIG).write_text(json.dumps(config))
    # As many tokens as rows: the converter cuts Gemma's embedding to its vocabulary.
    tokenizer = Tokenizer.from_file(str(directory / TOKENIZER))
    missing = range(tokenizer.get_vocab_size(), VOCABULARY_SIZE)
    tokenizer.add_special_tokens([AddedToken(f"<extra_{number}>") for number in missing])
    tokenizer.save(str(directory / TOKENIZER))
    if architecture == "Qwen3VLMoeForConditionalGeneration":
        tensors = load_file(directory / WEIGHTS)
        for name, tensor in tensors.items():
            # Input features are first as published; transformers 5 writes output features first.
            if ".mlp.experts." in name:
                tensors[name] = tensor.transpose(1, 2).contiguous()
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


CASES: list[Case] = [
    (architecture, variant) for architecture, variants in SMALL_CONFIGS.items() for variant in variants
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Written]:
    """The file of every case: the converter is started once."""
    directory = tmp_path_factory.mktemp("converted")
    places = {case: directory / "--".join(case) for case in CASES}
    models = {case: make_checkpoint(case, place) for case, place in places.items()}
    jobs = [(place, place.with_suffix(".gguf"), FLAGS.get(case[0], [])) for case, place in places.items()]
    said = run_converter(jobs)
    return {
        case: Written(models[case], path, words)
        for (case, (_, path, _)), words in zip(zip(CASES, jobs, strict=True), said, strict=True)
    }


def is_equal(model_dir: Path, theirs: TransformersModel) -> bool:
    paged = load_paged(model_dir, "cpu")
    return not any(wrong_rows(paged.prefill_all(paged.add(prompt)), theirs, prompt) for prompt in make_prompts((1, 90)))


@pytest.mark.parametrize("case", CASES, ids="--".join)
def test_a_converted_model_computes_the_same_or_is_refused_for_a_reason(
    written: dict[Case, Written], case: Case, tmp_path: Path
) -> None:
    file = written[case]
    if words := UNWRITTEN.get(case[0], UNWRITTEN_VARIANTS.get(case)):
        assert file.said is not None
        assert words in file.said
        return
    assert file.said is None
    if case in REFUSED:
        with pytest.raises(UnimportableError, match=REFUSED[case]):
            convert(file.path, tmp_path / "model")
        return
    convert(file.path, tmp_path / "model")
    assert is_equal(tmp_path / "model", file.theirs) == (case not in LOST), LOST.get(case)


# By number in llama.h, `llama_ftype`: mixtures of every kind of block, as people download them.
MIXTURES = {
    "Q4_0": 2,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q2_K": 10,
    "Q3_K_M": 12,
    "Q4_K_M": 15,
    "Q5_K_M": 17,
    "Q6_K": 18,
    "IQ4_XS": 30,
}
# Rows of whole blocks of 256.
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
QUANTISED = {
    "LlamaForCausalLM": WIDE,
    "Qwen3ForCausalLM": WIDE,
    "Qwen3MoeForCausalLM": {**WIDE, "moe_intermediate_size": 256, "norm_topk_prob": True},
    "Gemma3ForCausalLM": {**WIDE, "query_pre_attn_scalar": 64},
    "Qwen3_5ForConditionalGeneration": {
        **WIDE,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 64,
    },
}


@pytest.fixture(scope="module")
def wide_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("wide")
    jobs: list[tuple[Path, Path, Sequence[str]]] = []
    for architecture, values in QUANTISED.items():
        variant = next(iter(SMALL_CONFIGS[architecture]))
        place = directory / architecture
        write_small_model(build_model(architecture, {**SMALL_CONFIGS[architecture][variant], **values}), place)
        write_as_published(architecture, place)
        jobs.append((place, place.with_suffix(".gguf"), FLAGS.get(architecture, [])))
    assert run_converter(jobs) == [None] * len(jobs)
    return {place.name: path for place, path, _ in jobs}


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("architecture", QUANTISED)
def test_what_the_quantiser_writes_is_read_as_its_own_library_reads_it(
    wide_files: dict[str, Path], architecture: str, mixture: str, tmp_path: Path
) -> None:
    path = tmp_path / "quantised.gguf"
    call_library("quantize", str(wide_files[architecture]), str(path), str(MIXTURES[mixture]))
    convert(path, tmp_path / "plain", keeps_formats=False)
    values = load_file(tmp_path / "plain" / WEIGHTS)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    kinds = {gguf.GGMLQuantizationType(tensor.tensor_type).name for tensor in stored.values()}
    assert kinds - {"F32", "F16"}
    # Neither its rows nor its columns change places.
    down = gguf.dequantize(stored["token_embd.weight"].data, stored["token_embd.weight"].tensor_type)
    np.testing.assert_array_equal(values["model.embed_tokens.weight"].numpy(), down)
    convert(path, tmp_path / "packed")
    theirs = TransformersModel(AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32))
    assert is_equal(tmp_path / "packed", theirs)
