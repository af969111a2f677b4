"""What every scheduler that is measured can do, and how its processor time is taken.

The peers' drivers run in virtual environments of their own, so this needs nothing but numpy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tests.bench.tokens import IntArray

MAX_MODEL_LEN = 262_144
MAX_NUM_BATCHED_TOKENS = 1_048_576

_NUM_CALIBRATION_ROUNDS = 300


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a scheduler is built for. Blocks are of `block_size` tokens."""

    max_num_seqs: int
    block_size: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and how many tokens are generated for it whatever they are; `key` counts requests from 0."""

    key: int
    prompt: npt.NDArray[np.int32]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What one step told its clients: a token each of `keys`, and which requests ended with it."""

    keys: IntArray
    tokens: IntArray
    ended: list[int]


class Stopwatch:
    """Adds up the processor time of what runs under it, on this thread."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_running = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count what is done meanwhile."""
        self.is_running = True
        start = time.thread_time()
        try:
            yield
        finally:
            self.is_running = False
            self.seconds += time.thread_time() - start


class Contestant(Protocol):
    """A scheduler beside a device that computes nothing.

    What is measured runs under `stopwatch`; what a benchmark needs around it does not.
    """

    stopwatch: Stopwatch

    def settle(self) -> None:
        """What it tells the garbage collector once it has started, before there are requests."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand over new requests, from their prompts to the waiting queue."""

    def step(self) -> StepTokens:
        """Return the oldest step's tokens, plan what follows; each row gets what `expected_tokens` says."""


def calibrate_us() -> float:
    """Processor time of a fixed piece of Python and numpy: how fast this machine runs such code just now."""
    columns = np.arange(512)
    table: dict[int, list[int]] = {}
    start = time.thread_time()
    for round_number in range(_NUM_CALIBRATION_ROUNDS):
        rows = columns[columns % 16 == round_number % 16]
        columns = columns + 1
        for row in rows.tolist():
            table.setdefault(row % 64, []).append(row)
        table[round_number % 64] = []
    return (time.thread_time() - start) * 1e6
