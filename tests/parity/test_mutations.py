"""The comparison with transformers detects a change in any tensor or setting of a checkpoint."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.model_files.model_dir import CONFIG
from shared.model_files.text_models import text_name
from tests.support.models.multimodal import text_of, with_text
from tests.support.models.parity import SmallModel, SmallModels, load_paged, make_prompts, wrong_rows
from tests.support.models.small_configs import ARCHITECTURES, SMALL_CONFIGS

# Long enough that every expert is chosen, and longer than what the small indexers select.
NUM_PROMPT_TOKENS = 150
WEIGHTS = "model.safetensors"

# Settings that every model depends on, with functions that change them.
SETTINGS: dict[str, Callable[[Any], Any]] = {
    "rms_norm_eps": lambda _: 0.02,
    "sliding_window": lambda size: size + 1,
    "num_experts_per_tok": lambda count: count - 1 or 2,
    "norm_topk_prob": lambda _: False,
    "n_group": lambda count: max(count // 2, 1),
    "topk_group": lambda count: count + 1 if count > 1 else count,
    "routed_scaling_factor": lambda factor: 1.25 * factor,
    "swiglu_limit": lambda limit: limit / 10,
    "index_topk": lambda count: count - 1,
    "rope_interleave": lambda _: False,
    "query_pre_attn_scalar": lambda scalar: scalar + 1,
}
ROPE_SETTINGS: dict[str, Callable[[Any], Any]] = {
    "rope_type": lambda _: "default",
    "rope_theta": lambda theta: 2 * theta,
    "factor": lambda factor: 2 * factor,
    "original_max_position_embeddings": lambda count: count // 2,
    "low_freq_factor": lambda factor: factor / 2,
    "high_freq_factor": lambda factor: 2 * factor,
    "beta_fast": lambda beta: beta / 4,
    "beta_slow": lambda beta: 4 * beta,
    "mscale": lambda factor: factor / 2,
    "mscale_all_dim": lambda factor: factor / 2,
    "llama_4_scaling_beta": lambda beta: 2 * beta,
    "partial_rotary_factor": lambda part: 1.0 if part == 0.5 else 0.5,
}


def kind_of(name: str) -> str:
    """The tensor's name without layer and expert numbers."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def mutations(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """For each kind of tensor, the replacements that a wrong loader could make.

    Norms become ones, other vectors zeros; two matrices of a kind are swapped, or the rows of a single one reversed.
    """
    kinds: dict[str, list[str]] = {}
    for name in sorted(filter(text_name, tensors)):
        kinds.setdefault(kind_of(name), []).append(name)
    changes = {}
    for kind, names in kinds.items():
        first, last = names[0], names[-1]
        tensor = tensors[first]
        if tensor.ndim == 1:
            is_scale = kind.endswith("norm.weight")
            changes[kind] = {first: torch.ones_like(tensor) if is_scale else torch.zeros_like(tensor)}
        elif first != last and tensors[last].shape == tensor.shape:
            changes[kind] = {first: tensors[last], last: tensor}
        else:
            changes[kind] = {first: tensor.flip(0)}
    return changes


def changed_settings(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For each setting of config.json that affects the computation, the configuration with a different value."""
    text = text_of(config)
    changes = {
        name: {**text, name: change(text[name])}
        for name, change in SETTINGS.items()
        if text.get(name) and change(text[name]) != text[name]
    }
    ropes = changed_ropes(text["rope_parameters"])
    changes |= {name: {**text, "rope_parameters": rope} for name, rope in ropes.items()}
    return {name: with_text(config, changed) for name, changed in changes.items()}


def changed_ropes(rope: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For each parameter of a rotation, the rotation with a different value; of rotations by type, those of each."""
    changes = {
        f"{kind}.{name}": {**rope, kind: changed}
        for kind, nested in rope.items()
        if isinstance(nested, dict)
        for name, changed in changed_ropes(nested).items()
    }
    return changes | {
        name: {**rope, name: change(rope[name])}
        for name, change in ROPE_SETTINGS.items()
        if name in rope and change(rope[name]) != rope[name]
    }


def is_seen(
    small: SmallModel,
    directory: Path,
    *,
    tensors: dict[str, Tensor] | None = None,
    config: dict[str, Any] | None = None,
) -> bool:
    """Whether a checkpoint with different `tensors` or `config` differs from the original transformers model."""
    shutil.copytree(small.directory, directory)
    if tensors is not None:
        changed = {**load_file(directory / WEIGHTS), **tensors}
        save_file({name: tensor.clone() for name, tensor in changed.items()}, directory / WEIGHTS)
    if config is not None:
        (directory / CONFIG).write_text(json.dumps(config))
    paged = load_paged(directory, "cpu")
    [prompt] = make_prompts((NUM_PROMPT_TOKENS,))
    return wrong_rows(paged.prefill_all(paged.add(prompt)), small.theirs, prompt) != []


def unseen(small_models: SmallModels, architecture: str, tmp_path: Path) -> list[str]:
    """The kinds of tensors, over all configurations, that can be changed without failing the comparison."""
    tried: set[str] = set()
    unseen_kinds = []
    for variant in SMALL_CONFIGS[architecture]:
        small = small_models.get(architecture, variant)
        changes = mutations(load_file(small.directory / WEIGHTS))
        new = [kind for kind in changes if kind not in tried]
        tried.update(new)
        for number, kind in enumerate(new):
            if not is_seen(small, tmp_path / f"{variant}-{number}", tensors=changes[kind]):
                unseen_kinds.append(kind)
    assert tried
    return unseen_kinds


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_changed_tensor_is_seen(small_models: SmallModels, tmp_path: Path, architecture: str) -> None:
    assert unseen(small_models, architecture, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_changed_setting_is_seen_in_some_configuration(
    small_models: SmallModels, tmp_path: Path, architecture: str
) -> None:
    seen: dict[str, bool] = {}
    for variant in SMALL_CONFIGS[architecture]:
        small = small_models.get(architecture, variant)
        for name, config in changed_settings(json.loads((small.directory / CONFIG).read_text())).items():
            if not seen.get(name):
                seen[name] = is_seen(small, tmp_path / f"{variant}-{name}", config=config)
    assert [name for name, is_name_seen in seen.items() if not is_name_seen] == []
