"""Every backend's latent attention and sparse indexer compared with their definitions in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.ops import BACKEND_NAMES, Ops, load_ops
from services.worker.ops.cpu import mla as cpu_mla
from tests.support.kernels.attention_batches import Batch, batches
from tests.support.kernels.latent_batches import (
    LATENT_DIM,
    NUM_HEADS,
    VALUE_DIM,
    LatentStep,
    Tokens,
    assert_close,
    padded,
)

every_backend = pytest.mark.parametrize("ops", [load_ops(name) for name in BACKEND_NAMES], ids=BACKEND_NAMES)
every_kind = pytest.mark.parametrize("is_prefill", [True, False])


latent_batches = batches() | batches(max_new=5, max_cached=200)


@every_backend
@given(batch=latent_batches, is_prefill=st.booleans())
@settings(max_examples=60)
def test_latents_are_keys_and_their_first_columns_are_values(ops: Ops, batch: Batch, is_prefill: bool) -> None:
    step = LatentStep(batch, is_prefill=is_prefill)
    output = step.attend(ops)
    assert output.shape == (batch.num_tokens, NUM_HEADS, VALUE_DIM)
    assert output.is_contiguous()
    assert_close(output, step.expected())


@every_backend
@given(batch=latent_batches, is_prefill=st.booleans(), num_selected=st.integers(1, 80))
@settings(max_examples=60)
def test_sparse_attention_sees_the_best_positions_and_the_lower_of_equal_ones(
    ops: Ops, batch: Batch, is_prefill: bool, num_selected: int
) -> None:
    step = LatentStep(batch, is_prefill=is_prefill)
    assert_close(step.attend(ops, num_selected=num_selected), step.expected(num_selected=num_selected))


@given(batch=latent_batches, is_prefill=st.booleans(), num_selected=st.integers(1, 80))
@settings(max_examples=40)
def test_cpu_computes_sparse_attention_in_rounds_of_any_size(batch: Batch, is_prefill: bool, num_selected: int) -> None:
    step = LatentStep(batch, is_prefill=is_prefill)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_mla, "_MAX_SPARSE_BYTES", 200 * LATENT_DIM * 4)
        patch.setattr(cpu_mla, "_MAX_INDEX_SCORES", 500)
        output = step.attend(load_ops("cpu"), num_selected=num_selected)
    assert_close(output, step.expected(num_selected=num_selected))


@every_backend
@every_kind
def test_short_contexts_are_attended_to_without_selection(ops: Ops, is_prefill: bool) -> None:
    step = LatentStep(Batch(16, [0, 30], [7, 2], 1), is_prefill=is_prefill)
    assert step.select(ops, 32) is None
    selected = step.select(ops, 31)
    assert selected is not None
    # The last token sees 32 positions, the one before it 31.
    assert [len(set(row) - {-1}) for row in selected.tolist()] == [1, 2, 3, 4, 5, 6, 7, 31, 31]


# Processors produce NaN with either sign. It counts as infinity: otherwise a row of NaN might select nothing at all.
SCORES = [-math.inf, -2.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 3e38, math.inf, math.nan, -math.nan]


@given(scores=st.lists(st.sampled_from(SCORES), min_size=1), data=st.data())
def test_cpu_takes_the_largest_scores_and_the_lower_column_of_equal_ones(
    scores: list[float], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(scores)))
    columns = cpu_mla.largest_columns(torch.tensor([scores]), count)
    ranks = [-math.inf if math.isnan(score) else -score for score in scores]
    best_first = sorted(range(len(scores)), key=lambda column: (ranks[column], column))
    assert columns[0].sort().values.tolist() == sorted(best_first[:count])


@every_backend
@every_kind
@pytest.mark.parametrize("num_selected", [None, 20])
def test_a_nan_in_one_row_does_not_spread(ops: Ops, is_prefill: bool, num_selected: int | None) -> None:
    step = LatentStep(Batch(16, [33, 20, 5], [1, 1, 1], 2), is_prefill=is_prefill)
    expected = step.expected(num_selected=num_selected)
    step.tokens.query[1] = step.tokens.index_query[1] = math.nan
    step.tokens.latents[1][-1] = step.tokens.index_keys[1][-1] = math.nan
    output = step.attend(ops, num_selected=num_selected)
    assert output[1].isnan().all()
    assert_close(output[[0, 2]], expected[[0, 2]])


@every_backend
@pytest.mark.parametrize("num_selected", [None, 4])
def test_a_padded_row_changes_nothing(ops: Ops, num_selected: int | None) -> None:
    step = LatentStep(Batch(16, [20, 0], [1, 1], 2), is_prefill=False)
    expected = step.expected(num_selected=num_selected)
    step.metadata = padded(step.metadata, 1)
    assert_close(step.attend(ops, num_selected=num_selected)[0], expected[0])
    held = step.cache.layers[0][0].isfinite().all(-1).sum()
    assert held == 21


@given(batch=batches(max_new=9), num_selected=st.none() | st.integers(1, 60), chunk=st.integers(1, 9))
@settings(max_examples=30)
def test_reference_gives_a_token_the_same_bits_in_any_batch_chunk_and_block(
    batch: Batch, num_selected: int | None, chunk: int
) -> None:
    ops = load_ops("reference")
    together = LatentStep(batch, is_prefill=True)
    expected = together.attend(ops, num_selected=num_selected)
    start = 0
    for seq, (cached, new) in enumerate(zip(batch.num_cached, batch.num_new, strict=True)):
        # Alone, in blocks of another size, a few tokens at a time.
        rows = slice(start, start + min(chunk, new))
        part = Batch(5, [cached], [rows.stop - rows.start], order=3)
        alone = LatentStep(part, is_prefill=False, tokens=together.tokens.part(seq, rows, part.context_lens[0]))
        assert torch.equal(alone.attend(ops, num_selected=num_selected), expected[rows])
        start += new


@every_backend
@pytest.mark.parametrize("num_selected", [None, 20])
def test_bfloat16_is_attended_to_in_bfloat16(ops: Ops, num_selected: int | None) -> None:
    batch = Batch(16, [20, 33, 5, 0], [1, 7, 20, 30], 2)
    step = LatentStep(batch, is_prefill=True, tokens=Tokens.random(batch, torch.bfloat16))
    output = step.attend(ops, num_selected=num_selected)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), step.expected(num_selected=num_selected), atol=0.05, rtol=0.05)
