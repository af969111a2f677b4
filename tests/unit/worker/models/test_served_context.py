"""The context served: the model's own or a shorter one, in every architecture, and known before weights are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.worker.layers.context_limit import ContextLimit
from services.worker.models.loader import LoadedModel, LoadOptions, load_model
from services.worker.ops import load_ops
from services.worker.weights.weight_files import WeightFiles
from shared.model_files.model_dir import ModelDirectoryError
from tests.support.models.multimodal import make_config
from tests.support.models.small_configs import ARCHITECTURES, CONTEXT_LENGTH, SMALL_CONFIGS
from tests.support.models.tiny_llama import write_tiny_llama


def load(directory: Path, context: ContextLimit, *, dummy_seed: int | None = 1) -> LoadedModel:
    options = LoadOptions(context=context, dummy_seed=dummy_seed)
    return load_model(directory, load_ops("reference"), torch.float32, lambda _: None, options=options)


def write_config(directory: Path, architecture: str, variant: str | None = None) -> None:
    variants = SMALL_CONFIGS[architecture]
    config = make_config(architecture, variants[variant or next(iter(variants))])
    config.architectures = [architecture]
    config.save_pretrained(directory)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_serves_the_context_that_is_set(tmp_path: Path, architecture: str) -> None:
    write_config(tmp_path, architecture)
    for limit, served in ((None, CONTEXT_LENGTH), (100, 100), (CONTEXT_LENGTH, CONTEXT_LENGTH)):
        loaded = load(tmp_path, ContextLimit(limit))
        assert (loaded.facts.context_length, loaded.model.context_length) == (served, served)
    with pytest.raises(ModelDirectoryError) as refusal:
        load(tmp_path, ContextLimit(CONTEXT_LENGTH + 1))
    assert str(refusal.value) == "--max-model-len 513 is above the model's own context of 512 tokens"
    assert load(tmp_path, ContextLimit(900, may_exceed_model=True)).facts.context_length == CONTEXT_LENGTH


def test_a_dynamic_rotation_extends_the_models_own_context(tmp_path: Path) -> None:
    write_config(tmp_path, "LlamaForCausalLM", "dynamic-rope")
    for limit, served in ((None, 1024), (1000, 1000), (100, 100)):
        assert load(tmp_path, ContextLimit(limit)).facts.context_length == served
    with pytest.raises(ModelDirectoryError, match="--max-model-len 1025 is above the model's own context of 1024"):
        load(tmp_path, ContextLimit(1025))


def test_a_context_that_the_model_lacks_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny_llama(tmp_path)
    monkeypatch.setattr(WeightFiles, "read", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ModelDirectoryError, match="--max-model-len 600 is above the model's own context of 512"):
        load(directory, ContextLimit(600), dummy_seed=None)
