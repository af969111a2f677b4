"""The columns kept by min-p, top-k and top-p in one row, compared with transformers' warpers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.worker.drawing.token_draw import TokenDraw


def make_draw(
    *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 7, choice: int = 0
) -> TokenDraw:
    return TokenDraw(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, choice=choice)


def kept_by(draw: TokenDraw, logits: npt.NDArray[np.float32]) -> list[int]:
    kept = draw.kept_columns(logits)
    return list(range(len(logits))) if kept is None else kept.tolist()


def random_logits(seed: int, vocabulary: int = 300) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(seed).normal(size=vocabulary) * 3).astype(np.float32)


@given(
    temperature=st.floats(1 / 8, 2.0, width=32),
    top_k=st.integers(0, 310),
    top_p=st.floats(1 / 64, 1.0, width=32),
    min_p=st.just(0.0) | st.floats(1 / 128, 1.0, width=32),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=300)
def test_the_same_columns_are_kept_as_by_transformers_warpers(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = random_logits(seed)
    kept = kept_by(make_draw(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p), logits)
    assume(not _is_at_an_edge(logits.astype(np.float64) / temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1.0 else []
    warped = warpers(torch.zeros(1, 1, dtype=torch.int64), torch.from_numpy(logits)[None])[0]
    assert kept == torch.isfinite(warped).nonzero()[:, 0].tolist()


def _is_at_an_edge(scaled: npt.NDArray[np.float64], *, top_k: int, top_p: float, min_p: float) -> bool:
    """Whether float32 sums, like those of transformers, may disagree with float64 sums about the kept columns."""
    weights = np.sort(np.exp(scaled - scaled.max()))[::-1]
    is_likely = weights >= min_p
    left = weights[is_likely][: top_k or None]
    shares = np.cumsum(left) / left.sum()
    return bool((np.abs(weights - min_p) < 1e-6).any() or (np.abs(shares - top_p) < 1e-5).any())


def test_min_p_keeps_columns_that_are_likely_relative_to_the_likeliest() -> None:
    logits = np.log(np.array([0.1, 0.5, 0.25, 0.15], np.float32))
    assert kept_by(make_draw(min_p=0.25), logits) == [1, 2, 3]
    assert kept_by(make_draw(min_p=0.4), logits) == [1, 2]
    assert kept_by(make_draw(min_p=1.0), logits) == [1]


def test_min_p_of_one_keeps_all_columns_tied_for_first() -> None:
    assert kept_by(make_draw(min_p=1.0), np.array([2.0, 0.0, 2.0], np.float32)) == [0, 2]


def test_min_p_applies_after_temperature() -> None:
    logits = np.log(np.array([0.6, 0.4], np.float32))
    assert kept_by(make_draw(min_p=0.5), logits) == [0, 1]
    assert kept_by(make_draw(min_p=0.5, temperature=0.5), logits) == [0]


def test_top_p_applies_to_what_min_p_has_kept() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert kept_by(make_draw(top_p=0.6), logits) == [0, 1]
    # The first has a share of 0.57 in 0.4 and 0.3.
    assert kept_by(make_draw(top_p=0.55, min_p=0.7), logits) == [0]
    assert kept_by(make_draw(top_p=0.6, min_p=0.7), logits) == [0, 1]


@pytest.mark.parametrize("filters", [{}, {"min_p": 0.05}, {"top_k": 9}, {"top_p": 0.9}])
def test_choices_of_one_request_have_their_own_noise(filters: dict[str, float]) -> None:
    logits = np.zeros(1000, np.float32)
    drawn = {make_draw(choice=choice, **filters).token(logits, 5) for choice in range(8)}  # type: ignore[arg-type]
    assert len(drawn) > 4


def test_filters_that_keep_everything_change_no_draw() -> None:
    logits = random_logits(3)
    for position in range(50):
        free = make_draw(temperature=1.5).token(logits, position)
        assert make_draw(temperature=1.5, min_p=1e-30).token(logits, position) == free


@pytest.mark.parametrize("temperature", [1e-5, 2.0])
@pytest.mark.parametrize("filters", [{}, {"min_p": 0.5}, {"top_k": 2}, {"top_p": 0.9}])
def test_the_largest_floats_are_drawn_like_any_others(temperature: float, filters: dict[str, float]) -> None:
    largest = float(np.finfo(np.float32).max)
    logits = np.array([-largest, largest, -np.inf], np.float32)
    assert make_draw(temperature=temperature, **filters).token(logits, 1) == 1  # type: ignore[arg-type]
