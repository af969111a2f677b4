"""The interface of every measured scheduler, and the measurement of its processor time.

Needs only numpy, since the peers' drivers run in separate virtual environments.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tests.bench.parts.tokens import IntArray

MAX_MODEL_LEN = 262_144
MAX_NUM_BATCHED_TOKENS = 1_048_576

_NUM_CALIBRATION_ROUNDS = 300


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes for which a scheduler is built."""

    max_num_seqs: int
    block_size: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt with a fixed number of tokens to generate; `key` numbers requests from 0."""

    key: int
    prompt: npt.NDArray[np.int32]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The output of one step: one token for each of `keys`, and the requests that ended."""

    keys: IntArray
    tokens: IntArray
    ended: list[int]


class Stopwatch:
    """Adds up the processor time of this thread while it is running."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_running = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measure the body of the `with` statement."""
        self.is_running = True
        start = time.thread_time()
        try:
            yield
        finally:
            self.is_running = False
            self.seconds += time.thread_time() - start


class Contestant(Protocol):
    """A scheduler with a device that computes nothing.

    Only the measured work runs under `stopwatch`.
    """

    stopwatch: Stopwatch

    def settle(self) -> None:
        """Configure the garbage collector as the real process does after its start, before any request."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Add new requests to the waiting queue, starting from their prompts."""

    def step(self) -> StepTokens:
        """Return the oldest step's tokens, as given by `expected_tokens`, and plan the next step."""


def calibrate_us() -> float:
    """Processor time of a fixed piece of Python and numpy, as a measure of the machine's current speed."""
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
