"""Models that run transformers' own code: what a checkpoint must have, and both ways to run a family equal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from services.worker.layout import RankLayout
from services.worker.models.generic.self_check import check_alone
from services.worker.models.loader import LoadOptions, load_model
from services.worker.models.planning import plan_model
from services.worker.ops import load_ops
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.parallel.communicator import Parallel
from shared.model_files.model_dir import WEIGHTS, ModelDirectoryError
from tests.support.models.generation import Way, generate
from tests.support.models.generic_configs import GENERIC_CONFIGS
from tests.support.models.generic_proofs import has_plan
from tests.support.models.paged_model import PagedModel
from tests.support.models.parity import SmallModels, TransformersModel, make_prompts, wrong_rows, wrong_tokens
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model
from tests.support.ranks.thread_ranks import run_ranks

PROMPTS = make_prompts((5, 70, 16))
NUM_TOKENS = 12
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def write(architecture: str, directory: Path) -> tuple[Any, Path]:
    model = build_model(architecture, GENERIC_CONFIGS[architecture])
    return model, write_small_model(model, directory)


def change(directory: Path, change_tensors: Change) -> None:
    tensors = change_tensors(load_file(directory / WEIGHTS))
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def load(directory: Path, backend: str = "cpu", **options: Any) -> PagedModel:
    ops = load_ops(backend)
    loaded = load_model(directory, ops, torch.float32, lambda _: None, options=LoadOptions(**options))
    return PagedModel(loaded.model, ops)


def without(end: str) -> Change:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.endswith(end)}


def beside(name: str) -> Change:
    return lambda tensors: {**tensors, name: torch.ones(2)}


@pytest.mark.parametrize(
    ("architecture", "change_tensors", "error"),
    [
        ("Phi3ForCausalLM", without("layers.1.self_attn.qkv_proj.weight"), "missing: model.layers.1.self_attn.qkv"),
        ("Phi3ForCausalLM", without("layers.0.input_layernorm.weight"), "missing: model.layers.0.input_layernorm"),
        ("Qwen2MoeForCausalLM", without("experts.3.up_proj.weight"), "experts.3.up_proj"),
        ("Qwen2MoeForCausalLM", without("layers.0.mlp.shared_expert_gate.weight"), "shared_expert_gate"),
        ("SmolLM3ForCausalLM", beside("model.layers.0.self_attn.q_norm.weight"), "unexpected for this architecture"),
        ("MiMoV2FlashForCausalLM", beside("model.layers.2.eh_proj.weight"), "unexpected for this architecture"),
        ("Starcoder2ForCausalLM", without("layers.0.mlp.c_fc.bias"), "missing: model.layers.0.mlp.c_fc.bias"),
    ],
)
def test_a_tensor_that_is_missing_or_left_over_is_named(
    tmp_path: Path, architecture: str, change_tensors: Change, error: str
) -> None:
    _, directory = write(architecture, tmp_path)
    change(directory, change_tensors)
    with pytest.raises(ModelDirectoryError, match=error):
        load(directory)


def test_tensors_that_transformers_passes_over_may_be_stored(tmp_path: Path) -> None:
    model, directory = write("MiMoV2FlashForCausalLM", tmp_path)
    change(directory, beside("model.mtp.layers.0.eh_proj.weight"))
    paged = load(directory)
    assert wrong_rows(paged.prefill_all(paged.add(PROMPTS[1])), TransformersModel(model), PROMPTS[1]) == []


def test_a_base_model_that_is_published_alone_is_read(tmp_path: Path) -> None:
    model, directory = write("GPT2LMHeadModel", tmp_path)

    def as_published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(2)}
        return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()} | masks

    change(directory, as_published)
    paged = load(directory)
    assert wrong_rows(paged.prefill_all(paged.add(PROMPTS[1])), TransformersModel(model), PROMPTS[1]) == []


def test_without_transformers_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, directory = write("Phi3ForCausalLM", tmp_path)
    # Put back with the modules: the import below makes another package of this name.
    monkeypatch.setattr("services.worker.models.generic", sys.modules["services.worker.models.generic"])
    for name in [name for name in sys.modules if name.startswith("services.worker.models.generic")]:
        monkeypatch.delitem(sys.modules, name)
    # Python finds no module of a name that has None.
    monkeypatch.setitem(sys.modules, "transformers", None)
    ops = load_ops("cpu")
    for read in (
        lambda: plan_model(directory, ops, torch.float32),
        lambda: load_model(directory, ops, torch.float32, lambda _: None),
    ):
        with pytest.raises(ModelDirectoryError, match=r"pip install '\.\[worker-transformers\]'"):
            read()


@pytest.mark.parametrize("architecture", [name for name in GENERIC_CONFIGS if not has_plan(name)])
def test_a_family_without_a_plan_is_refused_on_several_ranks(tmp_path: Path, architecture: str) -> None:
    _, directory = write(architecture, tmp_path)
    ops = load_ops("cpu")

    def plan(parallel: Parallel) -> None:
        plan_model(directory, ops, torch.float32, parallel=parallel)

    with pytest.raises(ModelDirectoryError, match="no tensor-parallel plan for this architecture: use one rank"):
        run_ranks([RankLayout(tp_rank=rank, tp_size=2) for rank in range(2)], plan, is_exact=False)


def mix_rows(model: Any) -> None:
    """Let each token of a step see the others."""

    def mix(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return output + output.mean(1, keepdim=True)

    model._base.layers[1].register_forward_hook(mix)


def mix_through_layers(model: Any) -> None:
    """Let a layer hand to the next one what belongs to all tokens."""
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        kept[:] = [output.mean(1, keepdim=True)]

    model._base.layers[0].register_forward_hook(keep)
    model._base.layers[1].register_forward_hook(lambda _module, _inputs, output: output + kept[0])


def keep_between_steps(model: Any) -> None:
    """Let a step see the one before it."""
    kept = [torch.zeros(())]

    def carry(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        carried, kept[0] = output + kept[0], output.mean()
        return carried

    model._base.layers[1].register_forward_hook(carry)


@pytest.mark.parametrize("mix", [mix_rows, mix_through_layers, keep_between_steps])
def test_what_mixes_sequences_does_not_pass_the_check(tmp_path: Path, mix: Callable[[Any], None]) -> None:
    _, directory = write("Phi3ForCausalLM", tmp_path)
    paged = load(directory)
    model: Any = paged.model
    check_alone(model, paged.ops, torch.device("cpu"))
    mix(model)
    with pytest.raises(ModelDirectoryError, match="sequences that share a step change each other's logits"):
        check_alone(model, paged.ops, torch.device("cpu"))


@pytest.mark.parametrize(
    ("backend", "quantization"), [("cpu", None), ("native", None), ("native", MatrixFormat.INT8)], ids=str
)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM"])
def test_families_of_ours_run_both_ways_alike(
    small_models: SmallModels, architecture: str, backend: str, quantization: MatrixFormat | None
) -> None:
    small = small_models.get(architecture, next(iter(SMALL_CONFIGS[architecture])))
    ours, theirs = (
        load(small.directory, backend, implementation=each, quantization=quantization)
        for each in ("lockstep", "transformers")
    )
    assert (ours.model.implementation, theirs.model.implementation) == ("lockstep", "transformers")
    way = Way(chunk_size=16, is_mixed=True)
    # Activations are rounded, for AMX to 15 bits: what differs in its last bit may be rounded to the other side.
    tolerance = 1e-5 if quantization is None else 1e-3
    for one, other in zip(*(generate(each, PROMPTS, NUM_TOKENS, way) for each in (ours, theirs)), strict=True):
        assert one.completion == other.completion
        largest = float(one.logits.abs().max())
        torch.testing.assert_close(other.logits, one.logits, rtol=0, atol=tolerance * largest)
        if quantization is None:
            assert wrong_tokens(small.theirs, other.prompt, other.completion) == []
