"""Checkpoints with towers, in every way in which they are stored: the text is that of transformers' whole model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.worker.models.config_keys import KEYS_OF_TOWERS, keys_without_effect
from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import load_ops
from shared.model_files.model_dir import CONFIG, WEIGHTS, ModelDirectoryError
from shared.model_files.text_models import text_name
from tests.support.models.multimodal import is_multimodal, make_config
from tests.support.models.packing_ops import PackingOps
from tests.support.models.paged_model import PagedModel
from tests.support.models.parity import SmallModel, SmallModels, TransformersModel, load_paged, make_prompts, wrong_rows
from tests.support.models.quantized_checkpoints import SCHEMES, write_quantized
from tests.support.models.small_configs import ARCHITECTURES, SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model

MULTIMODAL = [name for name in ARCHITECTURES if is_multimodal(name)]
[PROMPT] = make_prompts((40,))
# How the language model's tensors are called in published checkpoints: its own prefix, and that of its head.
PREFIXES = {
    "by transformers 5": ("model.language_model.", ""),
    "in a model of its own": ("language_model.model.", "language_model."),
    "without a model": ("language_model.", "model.language_model."),
    "at the top": ("model.", ""),
}


def first(small_models: SmallModels, architecture: str) -> SmallModel:
    return small_models.get(architecture, next(iter(SMALL_CONFIGS[architecture])))


def logits_of(directory: Path) -> Tensor:
    paged = load_paged(directory, "cpu")
    return paged.prefill_all(paged.add(PROMPT))


def rewrite(directory: Path, change: Callable[[str], str | None]) -> None:
    tensors = load_file(directory / WEIGHTS)
    renamed = {new: tensor for name, tensor in tensors.items() if (new := change(name)) is not None}
    save_file(renamed, directory / WEIGHTS, metadata={"format": "pt"})


def digest_of(directory: Path) -> str:
    return load_model(directory, load_ops("cpu"), torch.float32, lambda _: None).weights_digest


def change_config(directory: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(change(config)))


@pytest.fixture
def copy(small_models: SmallModels, tmp_path: Path) -> Callable[[str], Path]:
    """Copies the first variant of an architecture."""
    return lambda name: Path(shutil.copytree(first(small_models, name).directory, tmp_path / name))


@pytest.mark.parametrize("case", PREFIXES)
@pytest.mark.parametrize("architecture", ["Mistral3ForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"])
def test_a_name_with_any_prefix_is_the_same_tensor(
    small_models: SmallModels, copy: Callable[[str], Path], architecture: str, case: str
) -> None:
    of_text, of_head = PREFIXES[case]

    def rename(stored: str) -> str:
        name = text_name(stored)
        if name is None:
            return stored
        return of_head + name if name.startswith("lm_head.") else of_text + name.removeprefix("model.")

    original, directory = first(small_models, architecture).directory, copy(architecture)
    rewrite(directory, rename)
    assert torch.equal(logits_of(directory), logits_of(original))
    assert digest_of(directory) == digest_of(original)


@pytest.mark.parametrize("architecture", MULTIMODAL)
def test_towers_are_not_needed(small_models: SmallModels, copy: Callable[[str], Path], architecture: str) -> None:
    original, directory = first(small_models, architecture).directory, copy(architecture)
    assert any(text_name(name) is None for name in load_file(directory / WEIGHTS))
    rewrite(directory, lambda name: name if text_name(name) else None)
    assert torch.equal(logits_of(directory), logits_of(original))


@pytest.mark.parametrize("architecture", MULTIMODAL)
def test_every_key_beside_the_texts_is_honoured_or_the_towers(architecture: str) -> None:
    whole = type(make_config(architecture, next(iter(SMALL_CONFIGS[architecture].values()))))
    theirs = {field.name for field in fields(whole)} | set(whole.attribute_map)
    # Read of every configuration; see `test_known_keys.py`.
    honoured = {"architectures", "is_encoder_decoder", "text_config", "tie_word_embeddings"}
    assert sorted(theirs - honoured - set(keys_without_effect(architecture)) - set(KEYS_OF_TOWERS)) == []


def test_a_tensor_that_is_neither_the_texts_nor_a_towers_is_reported(copy: Callable[[str], Path]) -> None:
    directory = copy("Qwen3VLForConditionalGeneration")
    rewrite(directory, lambda name: name.replace("model.visual.patch_embed", "model.unknown"))
    with pytest.raises(ModelDirectoryError, match=r"unexpected for this architecture: model\.unknown"):
        load_paged(directory, "cpu")


def test_a_tensor_that_is_stored_under_two_names_is_refused(copy: Callable[[str], Path]) -> None:
    directory = copy("Qwen3VLForConditionalGeneration")
    tensors = load_file(directory / WEIGHTS)
    tensors["language_model.model.norm.weight"] = tensors["model.language_model.norm.weight"].clone()
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ModelDirectoryError, match=r"are both model\.norm\.weight of the text"):
        load_paged(directory, "cpu")


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("scheme", ["fp8, blocks", "compressed int4, groups"])
@pytest.mark.parametrize("architecture", ["Mistral3ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"])
def test_what_is_quantised_is_read_with_its_configuration_in_either_place(
    small_models: SmallModels, tmp_path: Path, architecture: str, scheme: str, is_nested: bool
) -> None:
    """The towers are quantised too here, which does no harm."""
    quantized, values = write_quantized(first(small_models, architecture).directory, tmp_path, SCHEMES[scheme])

    def move(config: dict[str, Any]) -> dict[str, Any]:
        stored = config.pop("quantization_config")
        return {**config, "text_config": {**config["text_config"], "quantization_config": stored}}

    if is_nested:
        change_config(quantized, move)
    assert torch.allclose(logits_of(quantized), logits_of(values), rtol=0, atol=1e-4)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_a_layer_that_a_list_names_with_a_prefix_is_not_packed(
    small_models: SmallModels, tmp_path: Path, prefix: str
) -> None:
    plain = first(small_models, "Qwen3VLForConditionalGeneration").directory
    quantized, _ = write_quantized(plain, tmp_path, SCHEMES["compressed int4, groups"])
    names = [f"{prefix}layers.0.self_attn.{name}_proj" for name in "qkvo"]

    def ignore(config: dict[str, Any]) -> dict[str, Any]:
        stored = config["quantization_config"]
        return {**config, "quantization_config": {**stored, "ignore": [*stored.get("ignore", []), *names]}}

    change_config(quantized, ignore)
    with pytest.raises(ModelDirectoryError, match=r"missing: model\.layers\.0\.self_attn\.q_proj\.weight"):
        load_model(quantized, PackingOps(), torch.float32, lambda _: None)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_a_text_that_was_taken_out_may_keep_its_rotation_by_sections(
    tmp_path: Path, architecture: str, spelling: str
) -> None:
    variants = (
        SMALL_CONFIGS.get(architecture) or SMALL_CONFIGS[architecture.replace("CausalLM", "ConditionalGeneration")]
    )
    model = build_model(architecture, next(iter(variants.values())))
    write_small_model(model, tmp_path)

    def keep(config: dict[str, Any]) -> dict[str, Any]:
        rope = config.pop("rope_parameters")
        kind = {"rope_scaling": {"type": "mrope"}, "rope_parameters": {"rope_type": "mrope"}}[spelling]
        return {**config, spelling: {**rope, **kind, "mrope_section": [4, 2, 2], "mrope_interleaved": True}}

    expected = logits_of(tmp_path)
    change_config(tmp_path, keep)
    assert torch.equal(logits_of(tmp_path), expected)
    assert wrong_rows(expected, TransformersModel(model), PROMPT) == []


def test_random_weights_of_a_shape_alone_are_those_of_the_text(copy: Callable[[str], Path]) -> None:
    directory = copy("Qwen3VLMoeForConditionalGeneration")
    (directory / WEIGHTS).unlink()
    ops = load_ops("cpu")
    loaded = load_model(directory, ops, torch.float32, lambda _: None, options=LoadOptions(dummy_seed=1))
    paged = PagedModel(loaded.model, ops)
    assert paged.prefill_all(paged.add(PROMPT)).isfinite().all()
