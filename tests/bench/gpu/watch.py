"""What must not happen while requests are served, and what a step costs the host, counted in this process."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from services.worker.layers.moe import Router


@dataclass
class Counts:
    """What happened."""

    num_compiled: int = 0
    """Kernels that Triton compiled, or read from its cache on disk."""
    num_captures: int = 0
    replays_s: list[float] = field(default_factory=list)
    """The host's time for each replay of a graph."""


@contextmanager
def watched() -> Iterator[Counts]:
    """Count during the body."""
    counts = Counts()
    graph = torch.cuda.CUDAGraph

    def count_capture(self: Any, *args: Any, **kwargs: Any) -> None:
        counts.num_captures += 1
        begin(self, *args, **kwargs)

    def time_replay(self: Any) -> None:
        started = time.perf_counter()
        replay(self)
        counts.replays_s.append(time.perf_counter() - started)

    begin: Callable[..., None] = graph.capture_begin
    replay: Callable[..., None] = graph.replay
    with (
        mock.patch.object(graph, "capture_begin", count_capture),
        mock.patch.object(graph, "replay", time_replay),
        _compilations(counts),
    ):
        yield counts


@contextmanager
def _compilations(counts: Counts) -> Iterator[None]:
    if importlib.util.find_spec("triton") is None:
        yield
        return
    runtime = importlib.import_module("triton").knobs.runtime

    def count(**_: object) -> None:
        counts.num_compiled += 1

    with mock.patch.object(runtime, "jit_post_compile_hook", count):
        yield


@dataclass
class Choices:
    """The experts that routers chose, in the order of their calls."""

    expert_ids: list[Tensor] = field(default_factory=list)
    """[T, k] each."""

    def num_touched(self, num_layers: int, *, every: int) -> float:
        """How many experts of a layer the last token of each prompt chose, all prompts together: the layers' mean.

        Args:
            num_layers: That have a router. Each step calls all of them.
            every: Tokens of a prompt, the same in all steps.
        """
        touched = 0
        for layer in range(num_layers):
            last = [chosen[every - 1 :: every].flatten() for chosen in self.expert_ids[layer::num_layers]]
            touched += len(set(torch.cat(last).tolist()))
        return touched / num_layers


@contextmanager
def watched_choices() -> Iterator[Choices]:
    """Record during the body, in which no step runs from a graph."""
    choices = Choices()
    route = Router.__call__

    def record(self: Router, x: Tensor) -> tuple[Tensor, Tensor]:
        expert_ids, weights = route(self, x)
        choices.expert_ids.append(expert_ids.cpu())
        return expert_ids, weights

    with mock.patch.object(Router, "__call__", record):
        yield choices
