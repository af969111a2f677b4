"""Captures on a GPU, here without one: what they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.forward.capture import CudaCapture


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pools of the graphs that are captured; a capture computes, and a replay does nothing."""
    used: list[int] = []
    numbers = count()

    class Graph:
        def replay(self) -> None:
            """See `torch.cuda.CUDAGraph`."""

    @contextmanager
    def capturing(_graph: Graph, *, pool: int, **_: Any) -> Iterator[None]:
        used.append(pool)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(numbers))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return used


def rows(size: int) -> Callable[[], Tensor]:
    return lambda: torch.full((size, 3), float(size))


def test_graphs_of_falling_sizes_share_a_pool_and_the_memory_of_their_results(pools: list[int]) -> None:
    capture = CudaCapture()
    results = [capture(rows(size))() for size in (8, 4, 1)]
    assert pools == [0, 0, 0]
    assert [len(result) for result in results] == [8, 4, 1]
    assert len({result.data_ptr() for result in results}) == 1
    assert results[0][:1].tolist() == [[1.0] * 3]


def test_results_of_other_rows_do_not_share_memory(pools: list[int]) -> None:
    capture = CudaCapture()
    hidden = capture(rows(4))()
    drawn = capture(lambda: torch.arange(4))()
    assert pools == [0, 0]
    assert (hidden.tolist(), drawn.tolist()) == ([[4.0] * 3] * 4, [0, 1, 2, 3])


def test_graphs_that_are_captured_again_have_a_pool_of_their_own(pools: list[int]) -> None:
    capture = CudaCapture()
    for size in (8, 4):
        capture(rows(size))
    capture.begin()
    assert capture(rows(16))().tolist() == [[16.0] * 3] * 16
    capture(rows(4))
    assert pools == [0, 0, 1, 1]
