"""Log-probabilities, compared with torch's and with sorting."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.ops import load_ops
from services.worker.sampling.logprobs import join_logprobs, token_logprobs
from shared.step.logprobs import Logprobs
from tests.support.worker.worker_steps import column

OPS = load_ops("cpu")


def random_logits(num_rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 4


def as_bytes(logprobs: Logprobs) -> list[bytes]:
    return [logprobs.ranks.tobytes(), logprobs.token_ids.tobytes(), logprobs.values.tobytes()]


@given(
    vocabulary=st.integers(1, 3000),
    num_top=st.integers(0, 20),
    num_requested=st.integers(0, 20),
    num_different=st.sampled_from([2, 30, 100_000]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150)
def test_a_position_has_its_token_the_requested_ones_and_the_likeliest_ones_in_order(
    vocabulary: int, num_top: int, num_requested: int, num_different: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.integers(num_different, size=(2, vocabulary)).astype(np.float32) / 10)
    token_ids = random.integers(vocabulary, size=2).astype(np.int32)
    requested = random.integers(vocabulary, size=num_requested).tolist()
    logprobs = token_logprobs(OPS, logits, token_ids, column([4, 7]), num_top=num_top, requested=requested)
    assert logprobs.indexes.tolist() == [4, 7]
    assert logprobs.requested_counts is None or logprobs.requested_counts.tolist() == [num_requested] * 2
    assert (logprobs.requested_counts is None) == (not requested)
    num_entries = 1 + num_requested + min(num_top, vocabulary)
    assert logprobs.counts.tolist() == [num_entries, num_entries]
    exact = torch.log_softmax(logits.double(), -1).numpy()
    for row in range(2):
        order = sorted(range(vocabulary), key=lambda token_id: (-logits[row, token_id].item(), token_id))
        entries = logprobs.token_ids[row * num_entries :][:num_entries]
        own_ids = [token_ids[row], *requested]
        assert entries.tolist() == [*own_ids, *order[:num_top]]
        ranks = logprobs.ranks[row * len(own_ids) :][: len(own_ids)]
        assert ranks.tolist() == [order.index(token_id) + 1 for token_id in own_ids]
        values = logprobs.values[row * num_entries :][:num_entries]
        np.testing.assert_allclose(values, exact[row, entries], rtol=2e-6, atol=2e-6)


def test_the_columns_have_the_dtypes_of_the_wire_format() -> None:
    logprobs = token_logprobs(OPS, random_logits(2, 9), column([1, 2]), column([0, 1]), num_top=3)
    columns = (logprobs.indexes, logprobs.ranks, logprobs.counts, logprobs.token_ids)
    assert [part.dtype for part in columns] == [np.int32] * 4
    assert logprobs.values.dtype == np.float32


def test_a_row_has_the_same_bytes_alone_and_in_any_batch() -> None:
    # An odd vocabulary size gives each row another alignment in memory.
    logits = random_logits(9, 10_007)
    token_ids = column(range(9))
    together = token_logprobs(OPS, logits, token_ids, token_ids, num_top=5)
    backwards = token_logprobs(OPS, logits.flip(0), token_ids[::-1].copy(), token_ids, num_top=5)
    for row in range(9):
        alone = token_logprobs(OPS, logits[[row]].clone(), token_ids[[row]], column([0]), num_top=5)
        for batch, place in ((together, row), (backwards, 8 - row)):
            assert batch.ranks[place] == alone.ranks[0]
            assert batch.token_ids[place * 6 :][:6].tobytes() == alone.token_ids.tobytes()
            assert batch.values[place * 6 :][:6].tobytes() == alone.values.tobytes()


def test_a_token_that_is_never_drawn_has_minus_infinity() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]])
    logprobs = token_logprobs(OPS, logits, column([1]), column([0]), num_top=2)
    assert logprobs.token_ids.tolist() == [1, 0, 2]
    np.testing.assert_allclose(logprobs.values, [-math.inf, math.log(0.5), math.log(0.5)], rtol=1e-6)
    assert logprobs.ranks.tolist() == [3]


def test_logits_of_any_magnitude_give_finite_values() -> None:
    largest = float(np.finfo(np.float32).max)
    logprobs = token_logprobs(OPS, torch.tensor([[largest, largest / 2]]), column([0]), column([0]), num_top=1)
    assert logprobs.values.tolist() == [0.0, 0.0]


def test_joined_parts_are_concatenated() -> None:
    logits = random_logits(3, 50)
    parts = [
        token_logprobs(OPS, logits[:1], column([3]), column([0]), num_top=2),
        token_logprobs(OPS, logits[1:], column([4, 5]), column([1, 2]), num_top=0),
        token_logprobs(OPS, logits[1:2], column([4]), column([3]), num_top=1, requested=(6, 7)),
    ]
    assert join_logprobs(parts[:2]).requested_counts is None
    joined = join_logprobs(parts)
    assert joined.indexes.tolist() == [0, 1, 2, 3]
    assert joined.counts.tolist() == [3, 1, 1, 4]
    assert joined.requested_counts is not None
    assert joined.requested_counts.tolist() == [0, 0, 0, 2]
    assert as_bytes(joined) == [b"".join(columns) for columns in zip(*map(as_bytes, parts), strict=True)]
