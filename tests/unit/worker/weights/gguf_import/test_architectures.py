"""What a file says of its architecture, and what follows where it says nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services.worker.weights.gguf_import.conversion import UnimportableError, convert
from services.worker.weights.gguf_import.metadata import WITHOUT_EFFECT
from tests.support.models.gguf_bytes import SmallFile, small_file
from tests.support.models.gguf_export import export_gguf
from tests.support.models.gguf_files import write_gguf
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model


def make(directory: Path, architecture: str, variant: str = "plain", **changes: Any) -> SmallFile:
    values = {**SMALL_CONFIGS[architecture][variant], **changes}
    write_small_model(build_model(architecture, values), directory / "small")
    export_gguf(directory / "small", directory / "small.gguf")
    return small_file(architecture, directory / "small.gguf")


def imported(file: SmallFile, changes: Mapping[str, Any], directory: Path) -> tuple[str, dict[str, Any]]:
    """The digest and the configuration of the file's model with changed keys; None takes a key away."""
    prefix = f"{file.metadata['general.architecture']}."
    changed = {**file.metadata, **{prefix + key: value for key, value in changes.items()}}
    content = file.with_metadata({key: value for key, value in changed.items() if value is not None})
    directory.mkdir()
    (directory / "changed.gguf").write_bytes(content)
    digest = convert(directory / "changed.gguf", directory / "model")
    return digest, json.loads((directory / "model" / "config.json").read_text())


def test_a_correction_bias_tells_that_scores_are_sigmoids(tmp_path: Path) -> None:
    file = make(tmp_path, "DeepseekV3ForCausalLM")
    stated = imported(file, {}, tmp_path / "stated")
    assert imported(file, {"expert_gating_func": None}, tmp_path / "silent") == stated
    assert stated[1]["architectures"] == ["DeepseekV3ForCausalLM"]


def test_glm_4_7_flash_is_known_by_its_blocks_and_tokens(tmp_path: Path) -> None:
    file = make(tmp_path, "DeepseekV2ForCausalLM", "query-lora", num_hidden_layers=47, vocab_size=154_880)
    # Without the bias that sigmoids are corrected by, which the model has.
    with pytest.raises(UnimportableError, match=r"lacks tensors: blk\.\d+\.exp_probs_b\.bias"):
        imported(file, {"expert_gating_func": None, "expert_weights_norm": True}, tmp_path / "flash")


def test_a_mixture_whose_scores_are_in_doubt_is_refused_and_the_doubt_named(tmp_path: Path) -> None:
    file = make(tmp_path, "DeepseekV2ForCausalLM", "query-lora")
    with pytest.raises(UnimportableError, match=r"lacks expert_gating_func: .* softmax or by sigmoid$"):
        imported(file, {"expert_gating_func": None, "expert_weights_norm": True}, tmp_path / "doubt")
    # Files of before the key, which llama.cpp reads so too.
    assert imported(file, {"expert_gating_func": None}, tmp_path / "old") == imported(file, {}, tmp_path / "new")


@pytest.mark.parametrize(
    ("architecture", "score", "supported"),
    [("DeepseekV2ForCausalLM", 3, "1, 2"), ("Glm4MoeForCausalLM", 1, "2"), ("GlmMoeDsaForCausalLM", 1, "2")],
)
def test_scores_of_another_kind_are_refused(tmp_path: Path, architecture: str, score: int, supported: str) -> None:
    file = make(tmp_path, architecture)
    with pytest.raises(UnimportableError, match=f"expert_gating_func {score}; supported here: {supported}$"):
        imported(file, {"expert_gating_func": score}, tmp_path / "other")


def test_blocks_that_draft_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    file = make(tmp_path, "Glm4MoeForCausalLM")
    num_layers = file.metadata["glm4moe.block_count"]
    changes = {"block_count": num_layers + 1, "nextn_predict_layers": 1}
    assert imported(file, changes, tmp_path / "apart") == imported(file, {}, tmp_path / "alone")


@pytest.mark.parametrize(
    ("context_length", "kinds"),
    [(1 << 18, ["full", "full", "full"]), (1 << 20, ["full", "full", "full"])],
)
def test_files_that_are_older_than_types_of_indexers_have_those_of_llama_cpp(
    tmp_path: Path, context_length: int, kinds: list[str]
) -> None:
    file = make(tmp_path, "GlmMoeDsaForCausalLM", "no-shared-indexer", num_hidden_layers=3)
    changes = {"attention.indexer.types": None, "context_length": context_length}
    assert imported(file, changes, tmp_path / "old")[1]["indexer_types"] == kinds


def test_a_layer_without_the_indexer_that_its_type_says_is_refused(tmp_path: Path) -> None:
    file = make(tmp_path, "GlmMoeDsaForCausalLM", "types")
    with pytest.raises(UnimportableError, match=r"lacks tensors: blk\.1\.indexer\.attn_k\.weight"):
        imported(file, {"attention.indexer.types": [True, True, True]}, tmp_path / "wrong")


@pytest.mark.parametrize("key", sorted(WITHOUT_EFFECT))
@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_keys_without_effect_change_nothing(tmp_path: Path, architecture: str, key: str) -> None:
    write_gguf(tmp_path / "plain.gguf", architecture)
    write_gguf(tmp_path / "more.gguf", architecture, more={key: 7})
    digests = [convert(tmp_path / f"{name}.gguf", tmp_path / name) for name in ("plain", "more")]
    assert digests[0] == digests[1]
    assert WITHOUT_EFFECT[key]
