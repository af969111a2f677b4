"""The tokens that rows get of those drawn at their places equal those of a plain loop over each run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.ops import BACKEND_NAMES, load_ops

# What was drawn at a place, -1 where it is not finite, and the draft that the next place was computed with.
Place = tuple[int, int]

tokens = st.integers(0, 2)
places = st.tuples(st.one_of(tokens, tokens, st.just(-1)), tokens)
runs_of_places = st.lists(st.lists(places, min_size=1, max_size=6), min_size=1, max_size=8)


def accepted(run: list[Place]) -> list[int]:
    """The tokens of one run, one at a time."""
    kept = []
    for number, (token_id, wanted) in enumerate(run):
        kept.append(token_id)
        is_last = number + 1 == len(run)
        if token_id < 0 or is_last or token_id != wanted or run[number + 1][0] < 0:
            break
    return kept


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@given(runs=runs_of_places)
def test_a_run_goes_on_while_what_is_drawn_is_wanted(backend: str, runs: list[list[Place]]) -> None:
    drawn = torch.tensor([token_id for run in runs for token_id, _ in run])
    wanted = torch.tensor([-1 if place == len(run) - 1 else run[place][1] for run in runs for place in range(len(run))])
    lengths = torch.tensor([len(run) for run in runs])
    counts, lasts = load_ops(backend).accept(drawn, wanted, lengths.cumsum(0) - lengths)
    expected = [accepted(run) for run in runs]
    assert (counts.dtype, lasts.dtype) == (torch.int64, torch.int64)
    assert counts.tolist() == [len(kept) for kept in expected]
    assert lasts.tolist() == [kept[-1] for kept in expected]
