"""How DeepSeek's configurations describe their feed-forward networks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.worker.models.config import ConfigValues
from services.worker.models.deepseek import read_dense_layers
from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import load_ops
from shared.model_files.model_dir import ModelDirectoryError
from tests.support.models.small_models import build_small_model, write_small_model


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {0, 1, 2}),
        ({"first_k_dense_replace": 1}, {0}),
        # The layers for multi-token prediction are never dense.
        ({"first_k_dense_replace": 9}, {0, 1, 2, 3}),
        ({"first_k_dense_replace": 3, "mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}, {1, 3}),
    ],
)
def test_dense_layers_are_the_first_ones_or_the_listed_ones(config: dict[str, object], expected: set[int]) -> None:
    assert read_dense_layers(ConfigValues(config), 4, default_count=3) == expected


@pytest.mark.parametrize(
    ("kinds", "message"), [(["dense", "sparse"], "not a list of 4 strings"), (["dense"] * 3 + ["odd"], "has 'odd'")]
)
def test_invalid_lists_of_layer_kinds_are_refused(kinds: list[str], message: str) -> None:
    with pytest.raises(ModelDirectoryError, match=message):
        read_dense_layers(ConfigValues({"mlp_layer_types": kinds}), 4, default_count=3)


@pytest.mark.parametrize(("backend", "dtype"), [("native", torch.int8), ("reference", torch.float8_e4m3fn)])
def test_latents_are_stored_in_the_models_type_only(tmp_path: Path, backend: str, dtype: torch.dtype) -> None:
    model_dir = write_small_model(build_small_model("DeepseekV2ForCausalLM", "plain"), tmp_path)
    options = LoadOptions(kv_dtype=dtype)
    with pytest.raises(ModelDirectoryError, match="--kv-cache-dtype: latents are stored in the model's type only"):
        load_model(model_dir, load_ops(backend), torch.float32, lambda _: None, options=options)
