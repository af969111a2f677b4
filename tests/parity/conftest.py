"""Shared by the comparisons: each small model is built once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.models.parity import SmallModels


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> SmallModels:
    return SmallModels(tmp_path_factory.mktemp("small-models"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small models are fastest on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
