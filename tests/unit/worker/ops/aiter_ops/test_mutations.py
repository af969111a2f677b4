"""Mistakes in the backend's calls of AITER that L0 cannot see are refused by the stand-ins or change the tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.aiter.mutant import Mutation, Outcome
from tests.support.aiter.process import aiter_environment
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model
from tests.support.system.processes import LineProcesses

pytestmark = pytest.mark.process

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("LlamaForCausalLM", {}),
    "window": ("MistralForCausalLM", {"sliding_window": 9}),
    "sinks": ("GptOssForCausalLM", {}),
    "fused": ("Qwen3MoeForCausalLM", {"hidden_size": 128, "moe_intermediate_size": 128}),
    "latent": ("DeepseekV3ForCausalLM", {}),
}
# As in test_models, of the logits of models that choose nothing.
LOGIT_TOLERANCE = 0.5

REFUSED = {
    "slots of int32": ("dense", "attention", "cache[1], slot_mapping", "cache[1], slot_mapping.int()", "type Long"),
    "a norm's arguments swapped": (
        "dense",
        "elementwise",
        "rmsnorm2d_fwd(rows, weight, eps)",
        "rmsnorm2d_fwd(weight, rows, eps)",
        "one stride",
    ),
    "heads packed by eight": (
        "dense",
        "attention",
        "key, value, cache[0]",
        "key, value, cache[0].unflatten(3, (-1, 8))",
        "not in flash layout",
    ),
    "positions without a second dimension": (
        "dense",
        "elementwise",
        "rows.positions.unsqueeze(1)",
        "rows.positions",
        "positions are",
    ),
    "tables too narrow for the last tile": (
        "dense",
        "attention",
        "return F.pad(tables, (0, -tables.shape[1] % blocks_per_tile))",
        "return tables",
        "past the block tables",
    ),
    "weights that are not marked as shuffled": (
        "fused",
        "experts",
        'shuffled.__dict__["is_shuffled"] = True',
        "pass",
        "cannot build a kernel",
    ),
    "experts' numbers of int64": (
        "fused",
        "experts",
        "expert_ids,\n            expert_mask",
        "expert_ids.long(),\n            expert_mask",
        "ids are int32",
    ),
}
WRONG = {
    "keys and values swapped": ("dense", "attention", "key, value, cache[0]", "value, key, cache[0]"),
    "pairs of neighbouring columns": (
        "dense",
        "elementwise",
        "_GPT_J if rows.is_interleaved else _NEOX",
        "_GPT_J",
    ),
    "pairs of distant columns": ("latent", "elementwise", "_GPT_J if rows.is_interleaved else _NEOX", "_NEOX"),
    "the sum is not kept": (
        "dense",
        "elementwise",
        "residual, residual, weight",
        "residual, torch.empty_like(residual), weight",
    ),
    "gate and up swapped": (
        "dense",
        "elementwise",
        "silu_and_mul(output, x)\n    else:",
        "silu_and_mul(output, x.roll(x.shape[1] // 2, dims=1))\n    else:",
    ),
    "the window is dropped": ("window", "attention", "if params.window is not None:", "if False:"),
    "the window is one token wider": ("window", "attention", "params.window - 1, 0", "params.window, 0"),
    "sinks are dropped": ("sinks", "attention", "sinks=params.sinks", "sinks=None"),
    "the scale is dropped": ("dense", "attention", "softmax_scale=params.scale", "softmax_scale=1.0"),
    "weights that are not shuffled": (
        "fused",
        "experts",
        "shuffle_weight(dense(matrix, dtype), layout=_SHUFFLED_TILE)",
        "dense(matrix, dtype)",
    ),
    "experts' biases are dropped": ("sinks", "experts", "if self._down_bias is not None:", "if False:"),
}

Ask = Callable[[Mutation], Outcome]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of small models."""
    directory = tmp_path_factory.mktemp("models")

    def write(name: str) -> Path:
        architecture, changes = MODELS[name]
        config = {**next(iter(SMALL_CONFIGS[architecture].values())), **changes}
        return write_small_model(build_model(architecture, config), directory / name)

    return {name: str(write(name)) for name in MODELS}


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Run a model on a changed backend."""
    processes = LineProcesses("tests.support.aiter.mutant", aiter_environment(tmp_path_factory.mktemp("aiter")))

    def run(mutation: Mutation) -> Outcome:
        (answer,) = processes.ask([json.dumps(asdict(mutation)) + "\n"])
        return Outcome(**json.loads(answer))

    yield run
    processes.close()


@pytest.mark.parametrize("model", MODELS)
def test_without_a_mutation_tokens_are_right(ask: Ask, models: dict[str, str], model: str) -> None:
    outcome = ask(Mutation(models[model]))
    assert (outcome.error, outcome.num_wrong) == ("", 0)
    if model in {"dense", "window"}:
        assert outcome.difference <= LOGIT_TOLERANCE


@pytest.mark.parametrize("mistake", REFUSED)
def test_it_is_refused(ask: Ask, models: dict[str, str], mistake: str) -> None:
    model, module, before, after, message = REFUSED[mistake]
    assert message in ask(Mutation(models[model], module, before, after)).error


@pytest.mark.parametrize("mistake", WRONG)
def test_it_changes_what_is_generated(ask: Ask, models: dict[str, str], mistake: str) -> None:
    model, module, before, after = WRONG[mistake]
    outcome = ask(Mutation(models[model], module, before, after))
    assert outcome.error == ""
    assert outcome.num_wrong > 0
