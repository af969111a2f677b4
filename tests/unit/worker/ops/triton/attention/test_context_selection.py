"""The sparse indexer on a GPU selects what its definition says, ties included."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from services.worker.ops.triton.attention import context_selection as module
from services.worker.ops.triton.backend import TritonOps
from tests.support.kernels.attention_batches import Batch
from tests.support.kernels.latent_batches import LatentStep, assert_close, pad_as_in_graph

# Decodes, drafts and chunks of more tokens than a program has.
BATCHES = ((Batch(1, [70, 0, 3], [1, 1, 5], 1), False), (Batch(3, [130, 20, 0], [2, 18, 12], 2), True))

every_kind = pytest.mark.parametrize("is_prefill", [True, False])


def select(step: LatentStep, num_selected: int) -> Tensor:
    selected = step.select(TritonOps(), num_selected)
    assert selected is not None
    assert selected.shape == (step.batch.num_tokens, num_selected)
    return selected


def check_selected(step: LatentStep, selected: Tensor) -> None:
    """Assert that the best positions are selected, each once, and nothing else."""
    count = selected.shape[1]

    def check_row(seq: int, row: int, position: int) -> Tensor:
        best = step.best(seq, row, position)[:count]
        assert sorted(selected[row].tolist()) == sorted([*best, *[-1] * (count - len(best))])
        return torch.empty(0)

    step.batch.attend_each(check_row)


@pytest.mark.parametrize(("batch", "is_prefill"), BATCHES)
@pytest.mark.parametrize("num_selected", [1, 20])
def test_the_best_positions_are_selected_and_the_lower_of_equal_ones(
    batch: Batch, is_prefill: bool, num_selected: int
) -> None:
    step = LatentStep(batch, is_prefill=is_prefill)
    check_selected(step, select(step, num_selected))


@pytest.mark.parametrize("num_rows", [3, 7, 20])
def test_rounds_of_a_few_tokens_select_the_same(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = LatentStep(Batch(16, [5, 20, 40, 3], [2, 10, 12, 18], 3), is_prefill=True)
    monkeypatch.setattr(module, "_MAX_RANKS", num_rows * step.metadata.max_context_len)
    check_selected(step, select(step, 20))


def test_all_of_a_short_context_is_selected_beside_a_long_one() -> None:
    step = LatentStep(Batch(16, [5, 200], [1, 12], 3), is_prefill=True)
    check_selected(step, select(step, 100))


def test_nothing_is_selected_where_every_context_is_short() -> None:
    step = LatentStep(Batch(16, [0, 30], [7, 2], 1), is_prefill=True)
    assert step.select(TritonOps(), 32) is None
    check_selected(step, select(step, 31))


@every_kind
def test_sparse_attention_sees_what_is_selected(is_prefill: bool) -> None:
    step = LatentStep(Batch(16, [50, 0, 9], [1, 2, 14], 4), is_prefill=is_prefill)
    assert_close(step.attend(TritonOps(), num_selected=16), step.expected(num_selected=16))


def test_one_sequences_nan_stays_its_own() -> None:
    step = LatentStep(Batch(16, [33, 20, 5], [1, 1, 12], 2), is_prefill=True)
    expected = select(step, 20)
    step.tokens.index_query[1] = step.tokens.index_keys[1][-1] = math.nan
    selected = select(step, 20)
    assert torch.equal(selected[[0, *range(2, 14)]].sort().values, expected[[0, *range(2, 14)]].sort().values)
    # NaN counts as the largest score, so all are equal.
    assert selected[1].sort().values.tolist() == list(range(20))


@pytest.mark.parametrize("context_len", [0, 1])
def test_a_row_of_padding_selects_only_what_it_has(context_len: int) -> None:
    step = LatentStep(Batch(16, [40, 20, 5], [1, 1, 1], 2), is_prefill=False)
    expected = select(step, 20)
    step.metadata = pad_as_in_graph(step.metadata, 1, context_len)
    selected = select(step, 20)
    assert torch.equal(selected[[0, 2]].sort().values, expected[[0, 2]].sort().values)
    assert selected[1].sort().values.tolist() == [-1] * (20 - context_len) + [0] * context_len
