"""What configuration and flags decide is refused before a tensor is read, whatever the files of weights are."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.worker.config import WorkerSettings
from services.worker.device import DeviceError
from services.worker.layout import RankLayout
from services.worker.models.loader import LoadOptions, load_model
from services.worker.models.planning import plan_model
from services.worker.ops import load_ops
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.triton.backend import TritonOps
from services.worker.parallel.communicator import Parallel
from services.worker.runner.start.build import build_model_runner
from services.worker.runner.start.plan_checks import check_plan
from services.worker.weights.weight_files import WeightFiles
from shared.model_files.model_dir import CONFIG, GENERATION_CONFIG, TOKENIZER, WEIGHTS, ModelDirectoryError
from tests.support.models.quantized_checkpoints import SCHEMES, write_quantized
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.ranks.thread_ranks import run_ranks

REFERENCE = {"ops_backend": "reference", "device": "cpu"}
TRITON = {"ops_backend": "triton", "device": "cpu"}
GENERIC = {**REFERENCE, "model_impl": "transformers"}
ONE_LAYER = {"num_hidden_layers": 1}


@dataclass(frozen=True)
class Refusal:
    """A start that is refused."""

    match: str
    flags: Mapping[str, Any] = field(default_factory=lambda: REFERENCE)
    config: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    draft: Mapping[str, Any] | None = None
    """Changes of the draft model's config.json; None if there is no draft model."""
    draft_token: str | None = None
    """A token that only the draft model has."""


# Each by what is wrong.
REFUSALS = {
    "no experts": Refusal("no experts for --ep", {**REFERENCE, "ep": True}),
    "no FP8": Refusal("no matrices in FP8", {**TRITON, "activation_quantization": "fp8"}),
    "no kernels for FP8": Refusal("backend reference has no kernels", {**REFERENCE, "activation_quantization": "fp8"}),
    "no prediction layers": Refusal("no layers for multi-token", {**REFERENCE, "draft_proposer": "mtp"}),
    "no kernels for int8": Refusal("backend reference has no kernels", {**REFERENCE, "quantization": "int8"}),
    "experts in transformers' code": Refusal(
        "--ep cannot split experts in transformers' code", {**GENERIC, "ep": True}
    ),
    "prediction layers in transformers' code": Refusal(
        "transformers' code has no layers for multi-token", {**GENERIC, "draft_proposer": "mtp"}
    ),
    "blocks of GGUF in transformers' code": Refusal(
        "GGUF's blocks are not read for transformers' code",
        GENERIC,
        {"quantization_config": {"quant_method": "gguf"}},
    ),
    "no such cache": Refusal("kernels of reference have only", {**REFERENCE, "kv_cache_dtype": "int8"}),
    "a context above the model's": Refusal("above the model's own context", {**REFERENCE, "max_model_len": 1024}),
    "a value that is not implemented": Refusal("hidden_act", config={"hidden_act": "relu"}),
    "heads that do not fit": Refusal("is not a multiple of", config={"num_key_value_heads": 3}),
    "an unknown architecture": Refusal("none of which is supported", config={"architectures": ["Other"]}),
    "an unknown quantisation": Refusal("quant_method", config={"quantization_config": {"quant_method": "other"}}),
    "a rotation without an angle": Refusal(
        "rope", config={"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}
    ),
    "a default out of range": Refusal("top_p", generation={"top_p": 7.0}),
    "a draft model with another vocabulary": Refusal("500 tokens, not 512", draft={"vocab_size": 500}),
    "a draft model with other tokens": Refusal("tokenizer.json differs", draft={}, draft_token="not-the-models"),
    "a draft model that is not supported": Refusal("hidden_act", draft={"hidden_act": "relu"}),
}


def refusal_of(model_dir: Path, refusal: Refusal, draft_dir: Path) -> str:
    """The error of a start."""
    flags = {"draft_proposer": "model", "draft_model": draft_dir} if refusal.draft is not None else {}
    settings = WorkerSettings.model_validate({"model_dir": model_dir, **refusal.flags, **flags})
    with pytest.raises((ModelDirectoryError, DeviceError), match=refusal.match) as caught:
        build_model_runner(settings, lambda _: None)
    return str(caught.value)


def read_nothing(_files: WeightFiles, name: str) -> None:
    """Takes the place of what reads tensors."""
    pytest.fail(f"{name} was read")


def change_json(path: Path, changes: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), changes=ONE_LAYER)


@pytest.mark.parametrize("name", REFUSALS)
def test_no_tensor_is_read_before_a_refusal(
    name: str, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = REFUSALS[name]
    model_dir, draft_dir = (Path(shutil.copytree(written, tmp_path / each)) for each in ("model", "draft"))
    change_json(model_dir / CONFIG, refusal.config)
    change_json(model_dir / GENERATION_CONFIG, refusal.generation)
    change_json(draft_dir / CONFIG, refusal.draft or {})
    if refusal.draft_token is not None:
        content = json.loads((draft_dir / TOKENIZER).read_text(encoding="utf-8"))
        content["model"]["vocab"][refusal.draft_token] = 999
        (draft_dir / TOKENIZER).write_text(json.dumps(content), encoding="utf-8")

    monkeypatch.setattr(WeightFiles, "read", read_nothing)
    refused = refusal_of(model_dir, refusal, draft_dir)
    for directory in (model_dir, draft_dir):
        (directory / WEIGHTS).write_bytes(b"no weights")
    assert refusal_of(model_dir, refusal, draft_dir) == refused
    for directory in (model_dir, draft_dir):
        (directory / WEIGHTS).unlink()
    assert refusal_of(model_dir, refusal, draft_dir) == refused


@pytest.mark.parametrize(
    ("num_ranks", "config", "match"),
    [
        (3, {}, "num_attention_heads 4 is not a multiple of 3"),
        (2, {"vocab_size": 1}, "vocab_size 1 cannot be split over 2"),
        (2, {"intermediate_size": 1}, "intermediate_size 1 cannot be split over 2"),
        (3, {"num_attention_heads": 6, "num_key_value_heads": 2}, "num_key_value_heads 2 is neither"),
    ],
)
def test_ranks_that_a_model_cannot_be_split_over_read_nothing(
    num_ranks: int, config: dict[str, Any], match: str, written: Path, tmp_path: Path
) -> None:
    shutil.copy(written / CONFIG, tmp_path)
    change_json(tmp_path / CONFIG, config)
    ops = load_ops("reference")

    def problem(parallel: Parallel) -> str:
        with pytest.raises(ModelDirectoryError, match=match) as caught:
            plan_model(tmp_path, ops, torch.float32, parallel=parallel)
        return str(caught.value)

    assert run_ranks([RankLayout(tp_rank=rank, tp_size=num_ranks) for rank in range(num_ranks)], problem)


def test_prediction_layers_that_are_counted_but_not_stored_are_told_by_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**small_config("Glm4MoeForCausalLM", "plain"), "num_nextn_predict_layers": 1}
    (tmp_path / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    save_file({"model.norm.weight": torch.ones(config["hidden_size"])}, tmp_path / WEIGHTS)
    monkeypatch.setattr(WeightFiles, "read", read_nothing)
    ops, options = load_ops("reference"), LoadOptions(with_mtp=True)
    assert plan_model(tmp_path, ops, torch.float32, options=options).model.mtp is None
    save_file({"model.layers.2.eh_proj.weight": torch.ones(1)}, tmp_path / WEIGHTS)
    layers = plan_model(tmp_path, ops, torch.float32, options=options).model.mtp
    assert layers is not None
    assert layers.num_layers == 1


def small_config(architecture: str, variant: str) -> dict[str, Any]:
    """The config.json of a small model, with what transformers would write into it."""
    defaults = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    return {**defaults, **SMALL_CONFIGS[architecture][variant], "architectures": [architecture]}


@pytest.mark.parametrize("architecture", SMALL_CONFIGS)
def test_a_plan_is_what_is_loaded(architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = small_config(architecture, next(iter(SMALL_CONFIGS[architecture])))
    (tmp_path / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    # The weights of the load have no values either, as only what the model says of itself is compared.
    options = LoadOptions(dummy_seed=0, device=torch.device("meta"))
    plan = plan_model(tmp_path, TritonOps(), torch.bfloat16, options=options)
    assert caplog.records == [], "the load says it"
    loaded = load_model(tmp_path, TritonOps(), torch.bfloat16, lambda _: None, options=options)
    assert any("window" in record.message for record in caplog.records) == bool(config.get("sliding_window"))
    for name in ("dtype", "kv_cache_spec", "state_spec", "context_length", "has_long_factors", "logits_width"):
        assert getattr(plan.model, name) == getattr(loaded.model, name), name
    assert plan.packed_formats == loaded.packed_formats
    assert plan.has_experts == any(name in config for name in ("num_experts", "n_routed_experts", "num_local_experts"))


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if "fp8" in scheme])
def test_fp8_that_no_kernel_multiplies_with_is_refused_before_a_tensor_is_read(
    scheme: str, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir, _ = write_quantized(written, tmp_path / "quantized", SCHEMES[scheme])
    monkeypatch.setattr(WeightFiles, "read", read_nothing)
    settings = WorkerSettings.model_validate({"model_dir": model_dir, **TRITON, "activation_quantization": "fp8"})
    plan = plan_model(model_dir, TritonOps(), torch.bfloat16)
    if scheme == "fp8, e5m2":
        with pytest.raises(ModelDirectoryError, match="not E4M3"):
            check_plan(settings, plan)
    else:
        check_plan(settings, plan)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_formats_of_a_plan_are_those_of_the_load(scheme: str, written: Path, tmp_path: Path) -> None:
    model_dir, _ = write_quantized(written, tmp_path / "quantized", SCHEMES[scheme])
    plan = plan_model(model_dir, TritonOps(), torch.bfloat16)
    (model_dir / WEIGHTS).rename(model_dir / "elsewhere")
    assert plan_model(model_dir, TritonOps(), torch.bfloat16).packed_formats == plan.packed_formats
    (model_dir / "elsewhere").rename(model_dir / WEIGHTS)
    loaded = load_model(model_dir, TritonOps(), torch.bfloat16, lambda _: None)
    assert plan.packed_formats >= loaded.packed_formats
    # Which FP8 a tensor is in, its header alone says.
    if scheme != "fp8, e5m2":
        assert (MatrixFormat.FP8 in plan.packed_formats) == (MatrixFormat.FP8 in loaded.packed_formats)
