"""Log-probabilities of one row's tokens."""

from __future__ import annotations

import numpy as np

from services.worker.drawing.row_logprobs import row_logprobs


def test_a_token_comes_before_the_most_likely_ones_with_its_rank() -> None:
    row = np.log(np.array([1, 4, 2, 1, 4], np.float32))
    entries, values, ranks = row_logprobs(row, [3], 3)
    assert entries.tolist() == [3, 1, 4, 2]
    np.testing.assert_allclose(np.exp(values), np.array([1, 4, 4, 2]) / 12, rtol=1e-6)
    # Three are more likely, and of equals the lower id comes first.
    assert ranks.tolist() == [5]


def test_each_token_has_its_value_and_rank() -> None:
    row = np.log(np.array([1, 4, 2, 1, 4], np.float32))
    entries, values, ranks = row_logprobs(row, [2, 4, 2], 1)
    assert entries.tolist() == [2, 4, 2, 1]
    np.testing.assert_allclose(np.exp(values), np.array([2, 4, 2, 4]) / 12, rtol=1e-6)
    assert ranks.tolist() == [3, 2, 3]
