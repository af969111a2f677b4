"""Pairwise (all-pairs) combinations, for tests whose factors may interfere, and parametrisation by them."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

NUM_TRIES = 50


def pairwise_rows(factors: Mapping[str, Sequence[Any]], *, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with one value per factor, such that every pair of values of two factors is in at least one row.

    Greedy: each row is the best of `NUM_TRIES` random completions of a pair that is still missing.
    """
    sizes = tuple((name, len(values)) for name, values in factors.items())
    return [{name: factors[name][index] for name, index in row} for row in _rows_of_places(sizes, seed)]


@functools.cache
def _rows_of_places(sizes: tuple[tuple[str, int], ...], seed: int) -> list[tuple[tuple[str, int], ...]]:
    """The rows for factors with these numbers of values, as places; many tests have factors of the same sizes."""
    rng = random.Random(seed)
    missing = {
        ((first, i), (second, j))
        for (first, num_first), (second, num_second) in combinations(sizes, 2)
        for i in range(num_first)
        for j in range(num_second)
    }
    rows = []
    while missing:
        start = dict(rng.choice(sorted(missing)))
        tries = [
            tuple((name, start.get(name, rng.randrange(num_values))) for name, num_values in sizes)
            for _ in range(NUM_TRIES)
        ]
        row = max(tries, key=lambda picks: sum(pair in missing for pair in combinations(picks, 2)))
        missing -= set(combinations(row, 2))
        rows.append(row)
    return rows


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
