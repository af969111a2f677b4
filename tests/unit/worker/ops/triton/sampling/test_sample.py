"""Tokens drawn on the device against those of `TokenDraw`, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.drawing.noise import gumbel, noise_words
from services.worker.ops.triton.sampling import sample as sampling
from services.worker.ops.triton.sampling.sample import sample
from tests.support.kernels.draws import Draw, draw_rows

# The interpreter computes with numpy.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

INF = float("inf")
LARGEST = float(np.finfo(np.float32).max)
FloatRow = npt.NDArray[np.float32]


def drawn(rows: Sequence[FloatRow], draws: Sequence[Draw]) -> list[int]:
    token_ids, is_finite = sample(torch.from_numpy(np.stack(rows)), draw_rows(draws))
    assert is_finite.all()
    return token_ids.tolist()


def assert_tokens_are_numpys(rows: Sequence[FloatRow], draws: Sequence[Draw]) -> None:
    assert drawn(rows, draws) == [draw.token(row) for row, draw in zip(rows, draws, strict=True)]


def random_logits(vocabulary: int, seed: int = 0, *, scale: float = 3.0) -> FloatRow:
    return (np.random.default_rng(seed).normal(size=vocabulary) * scale).astype(np.float32)


def logits_of_kind(kind: str, vocabulary: int, seed: int) -> FloatRow:
    logits, rng = random_logits(vocabulary, seed), np.random.default_rng(seed)
    match kind:
        case "bfloat16":
            logits = torch.from_numpy(logits).bfloat16().float().numpy()
        case "tied":
            logits = np.round(logits)
        case "zeros":
            logits = rng.choice(np.array([0.0, -0.0], np.float32), vocabulary)
        case "wide":
            logits *= 1e5
        case "masked":
            logits[rng.random(vocabulary) < 0.8] = -INF
            logits[rng.integers(vocabulary)] = 1.0
    return logits


KINDS = ("plain", "bfloat16", "tied", "zeros", "wide", "masked")
FILTERS = (
    Draw(),
    Draw(temperature=0.6, top_k=20, top_p=0.95),
    Draw(top_p=0.9),
    Draw(top_p=0.99, temperature=2.0),
    Draw(min_p=0.05),
    Draw(min_p=1e-30, top_p=0.5),
    Draw(top_k=7, min_p=0.2, top_p=0.8),
)

draws = st.builds(
    Draw,
    temperature=st.sampled_from([0.0, 1e-5, 2e-5, 0.6, 1.0, 2.0, 1e4, 1e30]) | st.floats(2**-10, 4, width=32),
    top_k=st.sampled_from([-1, 0, 0, 0, 1, 2, 20]) | st.integers(1, 280),
    top_p=st.sampled_from([1.0, 1.0, 0.5, 0.95, 1e-45, 1 - 2**-24]) | st.floats(2**-20, 1, width=32),
    min_p=st.sampled_from([0.0, 0.0, 1e-45, 1e-30, 0.05, 1.0]) | st.floats(2**-20, 1, width=32),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 2**32 - 1),
    position=st.integers(0, 2**40),
)


@given(
    vocabulary=st.sampled_from([33, 64, 100, 257]),
    rows=st.lists(st.tuples(draws, st.sampled_from(KINDS), st.integers(0, 1000)), min_size=3, max_size=3),
)
@settings(max_examples=30)
def test_drawn_tokens_are_numpys(vocabulary: int, rows: list[tuple[Draw, str, int]]) -> None:
    logits = [logits_of_kind(kind, vocabulary, seed) for _, kind, seed in rows]
    assert_tokens_are_numpys(logits, [draw for draw, _, _ in rows])


@pytest.mark.parametrize("kind", ["plain", "bfloat16"])
def test_rows_wider_than_a_tile_are_drawn_from_as_any_others(kind: str) -> None:
    greedy = Draw(temperature=0.0)
    rows = [logits_of_kind(kind, 5000, seed) for seed in range(len(FILTERS) + 1)]
    assert_tokens_are_numpys(rows, [*FILTERS, greedy])


def test_long_lists_of_candidates_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_CHUNK", 64)
    monkeypatch.setattr(sampling, "_GATHER_CHUNK", 2)
    flat = [Draw(temperature=3.0, top_k=150, top_p=0.9), Draw(temperature=3.0, top_p=0.9), Draw(top_k=150)]
    rows = [np.round(random_logits(300, seed, scale=1.0)) for seed in range(len(flat))]
    assert_tokens_are_numpys(rows, flat)
    # No room for dense lists: groups of columns instead.
    monkeypatch.setattr(sampling, "_CAPACITY", 16)
    assert_tokens_are_numpys(rows, flat)


def test_a_token_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [random_logits(5000, seed) for seed in range(len(FILTERS))]
    alone = [drawn([row], [draw])[0] for row, draw in zip(rows, FILTERS, strict=True)]
    # Large batches are read in fewer, longer parts.
    monkeypatch.setattr(sampling, "_WANTED_PROGRAMS", 1)
    assert drawn(rows, FILTERS) == alone


def test_a_column_whose_lower_bound_is_not_the_lowest_may_win() -> None:
    logits = np.full(64, -60.0, np.float32)
    logits[[5, 17]] = 1.0, 0.3
    draws = [Draw(position=position) for position in range(3000) if is_close_call(logits, position, (5, 17))]
    assert len(draws) > 20
    assert_tokens_are_numpys([logits] * 20, draws[:20])


def is_close_call(logits: FloatRow, position: int, columns: tuple[int, int]) -> bool:
    """Whether the order of two scores is not that of the bounds in `least_exponential`, though not nearly so."""
    few = list(columns)
    exponentials = np.exp(-gumbel(noise_words(Draw.seed, position, 64)))[few]
    rest = 1 - np.exp(-exponentials)
    bounds = sum(rest**power / power for power in range(1, 6)) / np.exp(logits[few])
    scores = exponentials / np.exp(logits[few])
    return bool(scores.argmin() != bounds.argmin() and bounds.max() > 0.8 * scores.max())


def test_scores_that_rounding_makes_equal_go_to_the_lower_token() -> None:
    equal = [np.full(8, value, np.float32) for value in (1e13, 1e15, -1e20)]
    rows = [row for row in equal for _ in range(3)]
    assert_tokens_are_numpys(rows, [Draw(position=position) for _ in equal for position in range(3)])
    assert drawn(equal[2:], [Draw()]) == [0]


def test_equal_logits_are_kept_and_drawn_by_lower_token() -> None:
    equal = np.ones(100, np.float32)
    half_kept = {
        replace(filters, position=position) for filters in (Draw(top_k=5), Draw(top_p=3 / 64)) for position in range(5)
    }
    tokens = drawn([equal] * len(half_kept), sorted(half_kept, key=repr))
    assert set(tokens) <= set(range(5))
    assert len(set(tokens)) > 2
    assert drawn([equal, equal], [Draw(temperature=0.0), Draw(top_k=1)]) == [0, 0]


@pytest.mark.parametrize("temperature", [1e-5, 2e-5, 2.0])
def test_the_largest_floats_are_drawn_from_as_any_others(temperature: float) -> None:
    logits = np.array([-LARGEST, LARGEST, -INF, LARGEST / 2], np.float32)
    draws = [replace(draw, temperature=temperature) for draw in FILTERS]
    assert drawn([logits] * len(draws), draws) == [1] * len(draws)


def test_rows_that_are_not_finite_are_flagged_and_get_some_token() -> None:
    plain = random_logits(33)
    nan, infinite = plain.copy(), plain.copy()
    nan[3], infinite[32] = np.nan, INF
    rows = [row for row in (plain, nan, infinite, np.full(33, np.nan), np.full(33, -INF)) for _ in FILTERS]
    token_ids, is_finite = sample(torch.from_numpy(np.stack(rows).astype(np.float32)), draw_rows(FILTERS * 5))
    assert is_finite.reshape(5, -1).all(1).tolist() == [True, False, False, False, False]
    assert is_finite.reshape(5, -1).any(1).tolist() == [True, False, False, False, False]
    assert ((token_ids >= 0) & (token_ids < 33)).all()


def test_greedy_tokens_of_rows_that_are_not_finite_are_torchs() -> None:
    rows = torch.from_numpy(np.stack([random_logits(100, seed) for seed in range(3)]))
    rows[0, 7], rows[1, 9], rows[2] = np.nan, INF, -INF
    token_ids, is_finite = sample(rows, draw_rows([Draw(temperature=0.0)] * 3))
    assert token_ids.tolist() == rows.argmax(-1).tolist() == [7, 9, 0]
    assert not is_finite.any()


def test_rows_may_have_a_stride() -> None:
    wide = torch.from_numpy(np.stack([random_logits(300, seed) for seed in range(len(FILTERS))]))
    token_ids, _ = sample(wide[:, :250], draw_rows(FILTERS))
    assert token_ids.tolist() == [draw.token(row) for draw, row in zip(FILTERS, wide[:, :250].numpy(), strict=True)]
