"""Parametrisation by several factors: all pairs of values in every run, all combinations in `make proofs`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from tests.support.pairwise import pairwise_rows


def every_pair(*, indirect: Sequence[str] = (), **factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise a test by all combinations of the factors' values.

    A few of them have every pair of values of two factors; the others are marked `proof`.

    Args:
        indirect: Those of the factors that are fixtures.
        factors: Values by the name of the test's argument.
    """
    places = {name: range(len(values)) for name, values in factors.items()}
    fast = {tuple(row.values()) for row in pairwise_rows(places)}
    rows = [
        pytest.param(
            *(values[place] for values, place in zip(factors.values(), row, strict=True)),
            marks=() if row in fast else pytest.mark.proof,
        )
        for row in product(*places.values())
    ]
    return pytest.mark.parametrize(tuple(factors), rows, indirect=indirect)


def some_of(fast: Sequence[tuple[Any, ...]], **factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise a test by all combinations of the factors' values; those not in `fast` are marked `proof`."""
    assert set(fast) <= set(product(*factors.values()))
    rows = [pytest.param(*row, marks=() if row in fast else pytest.mark.proof) for row in product(*factors.values())]
    return pytest.mark.parametrize(tuple(factors), rows)
