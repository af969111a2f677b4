"""Log-probabilities of one row's tokens."""

from __future__ import annotations

import numpy as np

from services.worker.drawing.row_logprobs import row_logprobs


def test_a_token_comes_before_the_most_likely_ones_with_its_rank() -> None:
    row = np.log(np.array([1, 4, 2, 1, 4], np.float32))
    entries, values, rank = row_logprobs(row, 3, 3)
    assert entries.tolist() == [3, 1, 4, 2]
    np.testing.assert_allclose(np.exp(values), np.array([1, 4, 4, 2]) / 12, rtol=1e-6)
    # Three are more likely, and of equals the lower id comes first.
    assert rank == 5
