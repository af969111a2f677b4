"""Models that run transformers' own code, against transformers in float32: whatever else a step computes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts

from services.worker.models.generic.self_check import check_alone
from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import load_ops
from shared.model_files.implementations import TESTED_TRANSFORMERS, TRANSFORMERS_ARCHITECTURES
from shared.model_files.model_dir import ModelDirectoryError
from tests.support.models.generic_configs import FAST, GENERIC_CONFIGS
from tests.support.models.generic_proofs import (
    BACKENDS,
    WAYS,
    ProofModels,
    ProofRow,
    all_rows,
    wrong_places,
)
from tests.support.models.paged_model import PagedModel
from tests.support.models.parity import TransformersModel, make_prompts, wrong_rows
from tests.support.models.small_models import build_model, write_small_model
from tests.support.tables.generic_table import DOCUMENT, ProvenRows, read_data, with_table


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ProofModels:
    return ProofModels(tmp_path_factory.mktemp("generic-models"))


@pytest.fixture(scope="module")
def proven() -> Iterator[ProvenRows]:
    """The rows that have passed; if they are all, as in `make proofs`, the table is written."""
    rows = ProvenRows()
    yield rows
    rows.write_if_whole()


def rows() -> list[Any]:
    """The fast ones, each with values of its own; all are left to `make proofs`."""
    fast = [
        ProofRow(name, list(WAYS)[number % len(WAYS)], BACKENDS[-number % len(BACKENDS)], 1 + number % 2)
        for number, name in enumerate(FAST)
    ]
    proofs = [pytest.param(row, marks=pytest.mark.proof, id=str(row)) for row in all_rows() if row not in fast]
    return [pytest.param(row, id=str(row)) for row in fast] + proofs


def test_the_table_is_what_is_tested() -> None:
    assert sorted(GENERIC_CONFIGS) == sorted(TRANSFORMERS_ARCHITECTURES)
    assert set(FAST) <= GENERIC_CONFIGS.keys()


@pytest.mark.parametrize("row", rows())
def test_greedy_tokens_are_those_of_transformers(models: ProofModels, proven: ProvenRows, row: ProofRow) -> None:
    assert wrong_places(models, row) == []
    proven.rows.add(row)
    proven.whole_layers[row.architecture] = models.whole_layers(row.architecture)


def test_the_document_has_what_was_proven() -> None:
    data, document = read_data(), DOCUMENT.read_text(encoding="utf-8")
    assert data["rows"] == sorted(map(str, all_rows())), "run `make proofs`"
    assert data["transformers"].startswith(f"{TESTED_TRANSFORMERS[-1]}.")
    assert with_table(document, data) == document, "run `make proofs`"


def test_a_class_beyond_the_table_is_served_by_name(tmp_path: Path) -> None:
    values = {**GENERIC_CONFIGS["GraniteForCausalLM"]}
    model = build_model("MistralForCausalLM", {key: values[key] for key in values if "multiplier" not in key})
    directory = write_small_model(model, tmp_path / "model")
    options = LoadOptions(implementation="transformers")
    ops = load_ops("cpu")
    loaded = load_model(directory, ops, torch.float32, lambda _: None, options=options)
    assert loaded.model.implementation == "transformers"
    prompt, theirs = make_prompts((40,))[0], TransformersModel(model)
    paged = PagedModel(loaded.model, ops)
    assert wrong_rows(paged.prefill_all(paged.add(prompt)), theirs, prompt) == []


@pytest.mark.parametrize("tested", [(), TESTED_TRANSFORMERS])
def test_a_release_of_transformers_that_is_not_tested_is_tried_first(
    models: ProofModels, monkeypatch: pytest.MonkeyPatch, tested: tuple[str, ...]
) -> None:
    tried = []

    def check(model: Any, ops: Any, device: torch.device) -> None:
        tried.append(model)
        check_alone(model, ops, device)

    monkeypatch.setattr("services.worker.models.generic.load.check_alone", check)
    monkeypatch.setattr("services.worker.models.generic.load.TESTED_TRANSFORMERS", tested)
    load_model(models.directory_of("Phi3ForCausalLM"), load_ops("cpu"), torch.float32, lambda _: None)
    assert bool(tried) is not bool(tested)


def refused(tmp_path: Path, config: dict[str, Any], **options: Any) -> str:
    """What the load of a model without weights is refused for."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    wanted = LoadOptions(implementation="transformers", dummy_seed=1, **options)
    with pytest.raises(ModelDirectoryError) as error:
        load_model(tmp_path, load_ops("cpu"), torch.float32, lambda _: None, options=wanted)
    return str(error.value)


def config_of(architecture: str, **changes: Any) -> dict[str, Any]:
    model_class: Any = getattr(__import__("transformers"), architecture)
    values = {**copy.deepcopy(GENERIC_CONFIGS.get(architecture, _SMALL)), **changes}
    config: dict[str, Any] = model_class.config_class(**values).to_dict()
    return {**config, "architectures": [architecture]}


_SMALL = {
    key: value
    for key, value in GENERIC_CONFIGS["Phi3ForCausalLM"].items()
    if key not in ("sliding_window", "tie_word_embeddings")
}


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("RecurrentGemmaForCausalLM", {}, "layers of type linear_attention are not attention"),
        ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}, "layers of type conv are not attention"),
        ("Lfm3ForCausalLM", {}, "layers of type"),
        (
            "GraniteMoeHybridForCausalLM",
            {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16},
            "layers of type linear_attention",
        ),
        (
            "MiniMaxForCausalLM",
            {"layer_types": ["linear_attention", "full_attention"]},
            "layers of type linear_attention",
        ),
        ("Llama4ForCausalLM", {"layer_types": ["chunked_attention"] * 2}, "layers of type chunked_attention"),
        ("DogeForCausalLM", {}, "a dry run ends with AttributeError: 'Mask' object"),
        ("VaultGemmaForCausalLM", {}, "has a soft cap"),
        ("BertLMHeadModel", {}, "its mask is neither causal nor a sliding window"),
        ("BambaForCausalLM", {}, "cannot be served"),
        (
            "LlamaForCausalLM",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope type dynamic changes with the longest sequence",
        ),
    ],
)
def test_what_would_mix_rows_is_refused_for_its_reason(
    tmp_path: Path, architecture: str, changes: dict[str, Any], reason: str
) -> None:
    assert reason in refused(tmp_path, config_of(architecture, **changes))


def test_experts_whose_matrices_have_other_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Qwen2MoeExperts.__init__

    def make_with_other_names(self: Qwen2MoeExperts, *arguments: Any) -> None:
        make(self, *arguments)
        self._parameters["last_proj"] = self._parameters.pop("down_proj")

    monkeypatch.setattr(Qwen2MoeExperts, "__init__", make_with_other_names)
    assert "mlp.experts: experts that are not" in refused(tmp_path, config_of("Qwen2MoeForCausalLM"))


def test_a_class_that_transformers_does_not_have_is_named(tmp_path: Path) -> None:
    config = {**config_of("Phi3ForCausalLM"), "architectures": ["StrangerForCausalLM"]}
    assert "has no decoder StrangerForCausalLM of type 'phi3'" in refused(tmp_path, config)


def test_code_of_the_model_s_own_is_never_run(tmp_path: Path) -> None:
    config = config_of("Phi3ForCausalLM", auto_map={"AutoModelForCausalLM": "modeling.Evil"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    options = LoadOptions(dummy_seed=1)
    loaded = load_model(tmp_path, load_ops("cpu"), torch.float32, lambda _: None, options=options)
    assert loaded.model.implementation == "transformers"
    assert not (tmp_path / "ran").exists()
