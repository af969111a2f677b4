"""Masks and edits on the device against `RowEdits.apply`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.drawing.row_edits import RowEdits
from services.worker.ops.triton.sampling.edits import AllowMasks, EditKind, Edits, apply_edits, apply_masks, edit_logits
from shared.request.sampling_params import SamplingOptions
from tests.support.kernels.sampling import make_state

WIDTH = 45
MINUS_INF = float("-inf")
PADDING = -1

# A row, a token, a kind and a value.
Edit = tuple[int, int, EditKind, float]
Mask = npt.NDArray[np.bool_]


@dataclass
class FixedMask:
    """A grammar that always allows the same tokens."""

    allowed: Mask
    has_failed: bool = False

    def mask(self) -> Mask:
        return self.allowed

    def advance(self, token_id: int) -> None:
        pass

    def prepare(self) -> None:
        pass


@dataclass(frozen=True)
class Row:
    """A sequence as its `SamplingState` sees it."""

    logits: npt.NDArray[np.float32]
    options: SamplingOptions
    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    allowed: Mask | None

    def edits(self) -> RowEdits:
        state = make_state(
            self.options,
            prompt=self.prompt,
            completion=self.completion,
            stop_token_ids=self.stop_token_ids,
            logits_width=len(self.logits),
            matcher=None if self.allowed is None else FixedMask(self.allowed),
        )
        return state.edits(len(self.prompt) + len(self.completion))


def edits_of(edits: Sequence[Edit]) -> Edits:
    rows, token_ids, kinds = torch.tensor([edit[:3] for edit in edits], dtype=torch.int32).T.contiguous()
    return Edits(rows, token_ids, kinds, values=torch.tensor([edit[3] for edit in edits]))


def edited(rows: Sequence[Row]) -> Tensor:
    """All rows' logits after their edits."""
    logits = torch.from_numpy(np.stack([row.logits for row in rows]))
    edit_logits(logits, [row.edits() for row in rows])
    return logits


def assert_edits_are_those_of_the_host(rows: Sequence[Row]) -> None:
    expected = np.stack([row.edits().apply(row.logits) for row in rows])
    assert np.array_equal(edited(rows).numpy(), expected)


def make_row(
    logits: Sequence[float],
    options: SamplingOptions | None = None,
    *,
    completion: tuple[int, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    allowed: Sequence[int] | None = None,
) -> Row:
    mask = None if allowed is None else np.isin(np.arange(len(logits)), allowed)
    return Row(np.array(logits, np.float32), options or SamplingOptions(), (0,), completion, stop_token_ids, mask)


token_ids = st.integers(0, WIDTH - 1)
# Few different ones, so that runs and repetitions are common.
few_ids = st.integers(0, 3)
penalties = st.just(0.0) | st.floats(-2, 2, width=32)
options = st.builds(
    SamplingOptions,
    repetition_penalty=st.just(1.0) | st.floats(0.125, 2.0, width=32),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 100, width=32), max_size=5).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    bad_words=st.lists(st.lists(few_ids, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    min_tokens=st.integers(0, 4),
)
logits_values = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, MINUS_INF, MINUS_INF, 3.4028234663852886e38])
row_logits = st.lists(logits_values, min_size=WIDTH - 1, max_size=WIDTH - 1).map(
    lambda values: np.array([*values, 1.0], np.float32)
)
rows = st.builds(
    Row,
    logits=row_logits,
    options=options,
    prompt=st.lists(token_ids, min_size=1, max_size=5).map(tuple),
    completion=st.lists(few_ids, max_size=6).map(tuple),
    stop_token_ids=st.sets(token_ids, max_size=4).map(tuple),
    allowed=st.none() | st.sets(token_ids, max_size=6).map(lambda ids: np.isin(np.arange(WIDTH), sorted(ids))),
)


@given(st.lists(rows, min_size=1, max_size=4))
@settings(max_examples=60)
def test_edited_logits_are_those_that_the_host_computes(rows: list[Row]) -> None:
    assert_edits_are_those_of_the_host(rows)


def test_a_mask_of_impossible_tokens_makes_them_equally_likely() -> None:
    logits = [1.0, MINUS_INF, MINUS_INF, 2.0]
    assert_edits_are_those_of_the_host([make_row(logits, allowed=[1, 2])])
    assert edited([make_row(logits, allowed=[1, 2])]).tolist() == [[MINUS_INF, 0.0, 0.0, MINUS_INF]]


def test_a_mask_that_allows_nothing_is_ignored() -> None:
    assert edited([make_row([1.0, 2.0], allowed=[])]).tolist() == [[1.0, 2.0]]


def test_bans_that_would_leave_nothing_do_not_apply() -> None:
    bans = SamplingOptions(min_tokens=3)
    logits = [MINUS_INF, 3.0, 2.0, MINUS_INF]
    rows = [
        make_row(logits, bans, stop_token_ids=(1, 2, 3)),
        make_row(logits, bans, stop_token_ids=(1, 3)),
        make_row(logits, bans, stop_token_ids=(2,), allowed=[2, 3]),
    ]
    assert_edits_are_those_of_the_host(rows)
    assert edited(rows)[:, 1:3].tolist() == [[3.0, 2.0], [MINUS_INF, 2.0], [MINUS_INF, 2.0]]


def test_a_row_without_bans_may_be_all_minus_infinity_beside_one_with_bans() -> None:
    logits = torch.tensor([[1.0, 2.0, MINUS_INF], [MINUS_INF] * 3])
    apply_edits(logits, edits_of([(0, 1, EditKind.FORBID, 0.0)]))
    assert logits.tolist() == [[1.0, MINUS_INF, MINUS_INF], [MINUS_INF] * 3]


def test_padding_edits_nothing() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    padding = [(PADDING, 1, kind, 5.0) for kind in EditKind]
    apply_edits(logits, edits_of([*padding, (0, 0, EditKind.BIAS, 3.0)]))
    masks = torch.tensor([PADDING], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    apply_masks(logits, AllowMasks(*masks))
    assert logits.tolist() == [[4.0, 2.0]]


def test_penalties_keep_the_largest_floats_finite() -> None:
    largest = float(np.finfo(np.float32).max)
    for penalty in (0.125, 2.0):
        options = SamplingOptions(repetition_penalty=penalty)
        assert_edits_are_those_of_the_host([make_row([largest, -largest, -0.0, 1.0], options, completion=(0, 1, 2))])


def test_rows_wider_than_a_tile_are_masked_throughout() -> None:
    width = 5000
    logits = np.random.default_rng(0).normal(size=width).tolist()
    bans = SamplingOptions(min_tokens=1, logit_bias=((4999, 3.0),))
    rows = [
        make_row(logits, allowed=range(0, width, 3)),
        make_row(logits, bans, allowed=[2048, 4999], stop_token_ids=(2048,)),
        make_row(logits, bans, allowed=[4999], stop_token_ids=(4999,)),
    ]
    assert_edits_are_those_of_the_host(rows)
