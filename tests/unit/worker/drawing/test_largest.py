"""The largest entries of a row, compared with sorting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.drawing.largest import largest


@given(size=st.integers(1, 3000), share=st.floats(0, 1), num_different=st.integers(1, 5000), seed=st.integers(0, 2**32))
@settings(max_examples=200)
def test_the_largest_come_first_and_of_equal_ones_the_lower_index(
    size: int, share: float, num_different: int, seed: int
) -> None:
    values = np.random.default_rng(seed).integers(num_different, size=size).astype(np.float32)
    count = round(share**3 * size)
    expected = sorted(sorted(range(size), key=lambda index: (-values[index], index))[:count])
    assert largest(values, count).tolist() == expected


@pytest.mark.parametrize("size", [5, 4000])
def test_minus_infinity_comes_last(size: int) -> None:
    values = np.full(size, -np.inf, np.float32)
    values[[1, 4]] = 2.0, 1.0
    assert largest(values, 2).tolist() == [1, 4]
    assert largest(values, 4).tolist() == [0, 1, 2, 4]
