"""Drawing tokens row by row: greedy, filtered and unfiltered."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.worker.drawing.noise import gumbel, noise_words
from services.worker.ops import load_ops
from services.worker.sampling.runs import SampledTokens
from services.worker.sampling.sampler import SAMPLING_VERSION
from services.worker.sampling.sampling_rows import SamplingRows
from tests.support.kernels.sampling import RowsWithDrafts, sample_with

VOCABULARY = 40


def make_rows(
    num_rows: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, first_position: int = 10
) -> SamplingRows:
    return SamplingRows(
        temperature=np.full(num_rows, temperature, np.float32),
        top_k=np.full(num_rows, top_k, np.int32),
        top_p=np.full(num_rows, top_p, np.float32),
        seed=np.full(num_rows, 77, np.uint64),
        choice=np.zeros(num_rows, np.uint32),
        position=np.arange(first_position, first_position + num_rows, dtype=np.int64),
    )


def sample(logits: Tensor, rows: SamplingRows) -> SampledTokens:
    return sample_with(load_ops("cpu"), logits, RowsWithDrafts.single(rows))


def random_logits(num_rows: int, *, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def drawn_share(logits: Tensor, num_draws: int = 4000, **params: float) -> npt.NDArray[np.float64]:
    """How often each token is drawn from one row's logits at successive positions."""
    sampled = sample(logits.expand(num_draws, -1).contiguous(), make_rows(num_draws, **params))  # type: ignore[arg-type]
    return np.bincount(sampled.token_ids, minlength=logits.shape[-1]) / num_draws


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_a_row_with_temperature_zero_takes_the_largest_logit(temperature: float) -> None:
    logits = random_logits(9)
    sampled = sample(logits, make_rows(9, temperature=temperature))
    assert sampled.token_ids.tolist() == logits.argmax(-1).tolist()
    assert sampled.token_ids.dtype == np.int32


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [3.0, 1.0, 3.0]])
    assert sample(logits, make_rows(2, temperature=0)).token_ids.tolist() == [1, 0]


def test_a_draw_is_the_largest_of_scaled_logit_plus_noise() -> None:
    logits = random_logits(1).expand(20, -1).contiguous()
    rows = make_rows(20, temperature=0.7)
    rows.choice[:] = np.arange(20) // 3
    noise = [gumbel(noise_words(77, 10 + row, VOCABULARY, choice=row // 3)) for row in range(20)]
    scores = logits.double().numpy() / np.float32(0.7) + np.stack(noise)
    assert sample(logits, rows).token_ids.tolist() == scores.argmax(-1).tolist()


def test_a_sampling_version_draws_these_tokens() -> None:
    """When it fails, raise `SAMPLING_VERSION`: exact answers must not go on where other tokens are drawn."""
    logits = torch.arange(8 * VOCABULARY).reshape(8, VOCABULARY) * 7919 % 1009 / 200
    rows = [
        make_rows(8),
        make_rows(8, temperature=0.5),
        make_rows(8, top_k=5),
        make_rows(8, top_p=0.5),
        make_rows(8, top_k=9, top_p=0.7),
    ]
    drawn = [sample(logits, each).token_ids.tolist() for each in rows]
    assert SAMPLING_VERSION == 1
    assert drawn == [
        [7, 21, 3, 7, 39, 5, 37, 14],
        [7, 27, 6, 6, 5, 5, 37, 30],
        [7, 20, 6, 6, 5, 5, 37, 30],
        [7, 7, 6, 6, 5, 5, 37, 11],
        [7, 7, 6, 6, 5, 5, 37, 11],
    ]


def test_draws_at_successive_positions_have_the_softmax_distribution() -> None:
    # Pearson's chi-squared over a vocabulary of 8; 7 degrees of freedom exceed 24.3 once in 1000. Other temperatures,
    # and successive seeds, are in test_sampler_distribution.py.
    logits = torch.tensor([[0.0, 1.0, -1.0, 0.5, 2.0, -0.5, 0.2, 1.4]])
    expected = torch.softmax(logits[0].double(), 0).numpy() * 10_000
    seen = drawn_share(logits, 10_000) * 10_000
    assert ((seen - expected) ** 2 / expected).sum() < 24.3


def test_top_k_keeps_the_largest_and_the_lower_of_equals_at_the_edge() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 3.0, 1.0]])
    assert np.flatnonzero(drawn_share(logits, top_k=3)).tolist() == [0, 1, 3]


def test_top_p_keeps_the_smallest_set_with_the_share() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    assert np.flatnonzero(drawn_share(logits, top_p=0.65)).tolist() == [1, 3]
    assert np.flatnonzero(drawn_share(logits, top_p=0.75)).tolist() == [1, 2, 3]


def test_top_p_keeps_the_lower_of_equals_at_the_edge() -> None:
    logits = torch.zeros(1, 8)
    assert np.flatnonzero(drawn_share(logits, top_p=0.5)).tolist() == [0, 1, 2, 3]


def test_top_p_applies_to_what_top_k_has_kept() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Among the first two, the first alone has a share of 4/7: enough for 0.55, not for 0.6.
    assert np.flatnonzero(drawn_share(logits, top_k=2, top_p=0.55)).tolist() == [0]
    assert np.flatnonzero(drawn_share(logits, top_k=2, top_p=0.6)).tolist() == [0, 1]


def test_temperature_applies_before_top_p() -> None:
    logits = torch.tensor([[0.6, 0.3, 0.1]]).log()
    assert np.flatnonzero(drawn_share(logits, top_p=0.75)).tolist() == [0, 1]
    assert np.flatnonzero(drawn_share(logits, top_p=0.75, temperature=0.5)).tolist() == [0]


def test_a_filtered_draw_uses_the_noise_of_the_kept_columns() -> None:
    logits = random_logits(30)
    free = sample(logits, make_rows(30)).token_ids
    kept_by_all = [row for row in range(30) if free[row] in logits[row].topk(5).indices]
    assert len(kept_by_all) > 5
    filtered = sample(logits, make_rows(30, top_k=5)).token_ids
    assert filtered[kept_by_all].tolist() == free[kept_by_all].tolist()


@given(
    top_k=st.integers(0, VOCABULARY + 3),
    top_p=st.floats(1 / 64, 1.0, width=32),
    temperature=st.floats(1 / 8, 2.0, width=32),
    seed=st.integers(0, 20),
)
def test_kept_columns_match_a_full_sort(top_k: int, top_p: float, temperature: float, seed: int) -> None:
    # Rounded, so that there are ties.
    logits = random_logits(200, seed=seed).mul(2).round().div(2)[:1].expand(200, -1).contiguous()
    sampled = sample(logits, make_rows(200, temperature=temperature, top_k=top_k, top_p=top_p))
    scaled = logits[0].double().numpy() / np.float32(temperature)
    order = sorted(range(VOCABULARY), key=lambda column: (-scaled[column], column))[: top_k or VOCABULARY]
    weights = np.exp(scaled[order] - scaled.max())
    before = np.cumsum(weights) - weights
    # A rounding error at the edge may keep one more.
    allowed = {order[place] for place in range(len(order)) if before[place] < top_p * weights.sum() * (1 + 1e-9)}
    assert set(sampled.token_ids.tolist()) <= allowed


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.5}])
def test_a_row_draws_the_same_alone_and_in_any_batch(params: dict[str, float]) -> None:
    logits = random_logits(12)
    together = sample(logits, make_rows(12, **params)).token_ids  # type: ignore[arg-type]
    alone = [
        int(sample(logits[[row]], make_rows(1, first_position=10 + row, **params)).token_ids[0])  # type: ignore[arg-type]
        for row in range(12)
    ]
    assert together.tolist() == alone


def test_seed_choice_and_position_change_the_draw() -> None:
    logits = torch.zeros(64, 1000)
    by_position = sample(logits, make_rows(64)).token_ids
    rows = make_rows(64)
    rows.position[:] = 10
    rows.seed[:] = np.arange(64)
    by_seed = sample(logits, rows).token_ids
    rows.seed[:] = 77
    rows.choice[:] = np.arange(64)
    by_choice = sample(logits, rows).token_ids
    assert len(set(by_position.tolist())) > 50
    assert len(set(by_seed.tolist())) > 50
    assert len(set(by_choice.tolist())) > 50


def test_greedy_and_drawn_rows_share_a_batch() -> None:
    logits = random_logits(6)
    rows = make_rows(6)
    drawn = sample(logits, rows).token_ids.copy()
    rows.temperature[::2] = 0
    mixed = sample(logits, rows).token_ids
    assert mixed[::2].tolist() == logits.argmax(-1)[::2].tolist()
    assert mixed[1::2].tolist() == drawn[1::2].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_rows_are_flagged_and_do_not_affect_the_others(temperature: float) -> None:
    logits = random_logits(6)
    expected = sample(logits, make_rows(6, temperature=temperature)).token_ids
    logits[1, 3] = math.nan
    logits[2, 0] = math.inf
    logits[4] = -math.inf
    sampled = sample(logits, make_rows(6, temperature=temperature))
    assert sampled.not_finite_rows.tolist() == [1, 2, 4]
    assert sampled.token_ids[[0, 3, 5]].tolist() == expected[[0, 3, 5]].tolist()


def test_a_column_of_minus_infinity_is_never_drawn() -> None:
    logits = torch.zeros(1, 4)
    logits[0, 2] = -math.inf
    for params in ({}, {"top_k": 3}, {"top_p": 0.99}):
        share = drawn_share(logits, **params)
        assert share[2] == 0
        assert sample(logits, make_rows(1)).not_finite_rows.size == 0


def test_finite_rows_are_not_flagged() -> None:
    sampled = sample(random_logits(3), make_rows(3))
    assert sampled.not_finite_rows.size == 0
    assert sampled.not_finite_rows.dtype == np.int32
