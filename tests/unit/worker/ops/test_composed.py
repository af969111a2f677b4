"""Ops made of other ops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.drawing.token_draw import TokenDraw
from services.worker.ops import BACKEND_NAMES, DrawRows, load_ops

VOCABULARY = 300


def draw_rows(draws: list[TokenDraw], positions: list[int]) -> DrawRows:
    """`draws` as columns."""
    seeds = np.array([draw.seed for draw in draws], np.uint64).view(np.int64)
    return DrawRows(
        temperature=torch.tensor([draw.temperature for draw in draws]),
        top_k=torch.tensor([draw.top_k for draw in draws], dtype=torch.int32),
        top_p=torch.tensor([draw.top_p for draw in draws]),
        min_p=torch.tensor([draw.min_p for draw in draws]),
        seed=torch.from_numpy(seeds),
        choice=torch.tensor([draw.choice for draw in draws]),
        position=torch.tensor(positions),
    )


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_each_row_is_drawn_as_it_would_be_alone(backend: str) -> None:
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 4
    draws = [
        TokenDraw(0.0, 0, 1.0, 0.0, 1, 0),
        TokenDraw(1.0, 0, 1.0, 0.0, 2**64 - 1, 0),
        TokenDraw(0.75, 20, 1.0, 0.0, 3, 1),
        TokenDraw(1.5, 0, 0.5, 0.0, 4, 2**32 - 1),
        TokenDraw(1.25, 0, 1.0, 0.125, 5, 0),
        TokenDraw(0.5, 50, 0.75, 0.0625, 6, 0),
    ]
    positions = [0, 1, 77, 1000, 2**31, 5]
    token_ids, is_finite = load_ops(backend).sample(logits, draw_rows(draws, positions))
    rows = zip(draws, logits.numpy(), positions, strict=True)
    assert token_ids.tolist() == [draw.token(row, position) for draw, row, position in rows]
    assert is_finite.all()


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_reported_with_a_token_of_the_vocabulary(backend: str, value: float) -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[1] = value
    rows = draw_rows([TokenDraw(1.0, 0, 1.0, 0.0, 1, 0)] * 3, [0, 0, 0])
    token_ids, is_finite = load_ops(backend).sample(logits, rows)
    assert is_finite.tolist() == [True, False, True]
    assert 0 <= int(token_ids[1]) < VOCABULARY
    assert token_ids[0] == token_ids[2]
