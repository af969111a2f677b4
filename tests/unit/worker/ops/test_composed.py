"""Ops made of other ops."""

from __future__ import annotations

import pytest
import torch

from services.worker.ops import BACKEND_NAMES, load_ops
from tests.support.kernels.draws import Draw, draw_rows

VOCABULARY = 300


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_each_row_is_drawn_as_it_would_be_alone(backend: str) -> None:
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 4
    draws = [
        Draw(0.0, seed=1, position=0),
        Draw(1.0, seed=2**64 - 1, position=1),
        Draw(0.75, top_k=20, seed=3, choice=1, position=77),
        Draw(1.5, top_p=0.5, seed=4, choice=2**32 - 1, position=1000),
        Draw(1.25, min_p=0.125, seed=5, position=2**31),
        Draw(0.5, top_k=50, top_p=0.75, min_p=0.0625, seed=6, position=5),
    ]
    token_ids, is_finite = load_ops(backend).sample(logits, draw_rows(draws))
    assert token_ids.tolist() == [draw.token(row) for draw, row in zip(draws, logits.numpy(), strict=True)]
    assert is_finite.all()


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_reported_with_a_token_of_the_vocabulary(backend: str, value: float) -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[1] = value
    token_ids, is_finite = load_ops(backend).sample(logits, draw_rows([Draw(seed=1, position=0)] * 3))
    assert is_finite.tolist() == [True, False, True]
    assert 0 <= int(token_ids[1]) < VOCABULARY
    assert token_ids[0] == token_ids[2]
