"""The edits of one row, where several apply to the same token."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.drawing.row_edits import RowEdits

MINUS_INF = float("-inf")


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def floats(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(values, np.float32)


def test_edits_apply_in_order_and_leave_the_logits() -> None:
    logits = floats(2.0, -2.0, 4.0, 8.0)
    edits = RowEdits(
        allowed=np.array([True, True, True, False]),
        banned_ids=ids(2),
        bias_ids=ids(0, 2),
        biases=floats(1.0, 100.0),
        repeated_ids=ids(0, 1),
        repetition_penalty=2.0,
        drawn_ids=ids(0),
        penalties=floats(0.25),
    )
    assert edits.apply(logits).tolist() == [1.25, -4.0, MINUS_INF, MINUS_INF]
    assert logits.tolist() == [2.0, -2.0, 4.0, 8.0]


@pytest.mark.parametrize(("banned", "expected"), [(ids(0), [MINUS_INF, 2.0]), (ids(0, 1), [1.0, 2.0])])
def test_bans_that_would_leave_no_token_do_not_apply(banned: np.ndarray, expected: list[float]) -> None:
    assert RowEdits(banned_ids=banned).apply(floats(1.0, 2.0)).tolist() == expected
