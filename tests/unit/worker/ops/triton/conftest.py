"""Shared by the tests of the Triton kernels."""

from __future__ import annotations

import pytest

from tests.support.kernels.interpreted_products import compute_float8, multiply_bfloat16, multiply_in_order


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `multiply_bfloat16`."""
    multiply_bfloat16(monkeypatch)


@pytest.fixture
def ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `multiply_in_order`."""
    multiply_in_order(monkeypatch)


@pytest.fixture
def float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `compute_float8`."""
    compute_float8(monkeypatch)
