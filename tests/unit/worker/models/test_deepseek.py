"""What DeepSeek's configurations say of their feed-forward networks."""

from __future__ import annotations

import pytest

from services.worker.models.config import ConfigValues
from services.worker.models.deepseek import read_dense_layers
from shared.model_dir import ModelDirectoryError


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {0, 1, 2}),
        ({"first_k_dense_replace": 1}, {0}),
        # Never one for multi-token prediction.
        ({"first_k_dense_replace": 9}, {0, 1, 2, 3}),
        ({"first_k_dense_replace": 3, "mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}, {1, 3}),
    ],
)
def test_dense_layers_are_the_first_ones_or_those_that_are_named(config: dict[str, object], expected: set[int]) -> None:
    assert read_dense_layers(ConfigValues(config), 4, default_count=3) == expected


@pytest.mark.parametrize(
    ("kinds", "message"), [(["dense", "sparse"], "not a list of 4 strings"), (["dense"] * 3 + ["odd"], "has 'odd'")]
)
def test_kinds_of_layers_that_do_not_fit_are_refused(kinds: list[str], message: str) -> None:
    with pytest.raises(ModelDirectoryError, match=message):
        read_dense_layers(ConfigValues({"mlp_layer_types": kinds}), 4, default_count=3)
