"""Pairwise (all-pairs) combinations, for tests of options that may interfere with each other."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

NUM_TRIES = 50


def pairwise_rows(factors: Mapping[str, Sequence[Any]], *, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with one value per factor, such that every pair of values of two factors is in at least one row.

    Greedy: each row is the best of `NUM_TRIES` random completions of a pair that is still missing.
    """
    rng = random.Random(seed)
    names = list(factors)
    missing = {
        ((first, i), (second, j))
        for first, second in combinations(names, 2)
        for i in range(len(factors[first]))
        for j in range(len(factors[second]))
    }
    rows = []
    while missing:
        start = dict(rng.choice(sorted(missing)))
        tries = [{name: start.get(name, rng.randrange(len(factors[name]))) for name in names} for _ in range(NUM_TRIES)]
        row = max(tries, key=lambda picks: sum(pair in missing for pair in combinations(picks.items(), 2)))
        missing -= set(combinations(row.items(), 2))
        rows.append({name: factors[name][index] for name, index in row.items()})
    return rows
