"""Measures how often a recomputed completion would come out the same: the price of inexact recovery.

In a greedy sequence each token should be the most likely one; a resumed sequence's last ones are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.forward.staging import to_device
from services.worker.ops import Ops
from services.worker.step import EnteringSequence, Int32Column, PrefillChunk

# The most of a sequence's last tokens that are compared.
_MAX_TOKENS = 64
# Bounds the logits in memory: 128 rows for a vocabulary of 128k are 64 MiB.
_MAX_ROWS = 128


@dataclass(slots=True)
class Replay:
    """A recomputed completion."""

    first_position: int
    """Where the comparison begins."""
    expected_token: int | None = None
    """Predicted by the last chunk for the next one's first token; None if not compared."""


@dataclass(frozen=True, slots=True)
class ReplayedChunk:
    """A step's recomputed tokens."""

    replay: Replay
    first_token: int
    """First index among the step's tokens."""
    num_tokens: int
    """At least 1."""
    position: int
    """The first token's position in its sequence."""
    is_last: bool
    """Whether the sequence so far ends here."""

    def scoring_tokens(self) -> npt.NDArray[np.int64]:
        """Indexes of tokens with logits for a compared token."""
        start = max(self.replay.first_position - 1 - self.position, 0)
        return np.arange(self.first_token + start, self.first_token + self.num_tokens - self.is_last)


class Replays:
    """The replays of a batch, by slot."""

    def __init__(self) -> None:
        self._by_slot: dict[int, Replay] = {}

    def __bool__(self) -> bool:
        return bool(self._by_slot)

    def enter(self, enter: EnteringSequence) -> None:
        """Add a greedy sequence without options that change logits, if it has a completion. Its slot must be free."""
        num_tokens = enter.num_cached_tokens + len(enter.chunk.token_ids) + enter.chunk.num_later_tokens
        if num_tokens > enter.num_prompt_tokens:
            self._by_slot[enter.chunk.slot] = Replay(max(enter.num_prompt_tokens, num_tokens - _MAX_TOKENS))

    def leave(self, slots: Int32Column) -> None:
        """Forget sequences."""
        for slot in slots.tolist():
            self._by_slot.pop(slot, None)

    def take_in(
        self, chunks: Sequence[PrefillChunk], positions: Int32Column, starts: Int32Column
    ) -> tuple[ReplayedChunk, ...]:
        """The chunks to compare, each from another slot; a sequence is forgotten after its last one.

        Args:
            positions: [len(chunks)], first positions in the sequences.
            starts: [len(chunks)], first indexes among the step's tokens.
        """
        replayed = []
        for chunk, position, start in zip(chunks, positions.tolist(), starts.tolist(), strict=True):
            replay = self._by_slot.get(chunk.slot)
            if replay is None:
                continue
            is_last = not chunk.num_later_tokens
            replayed.append(ReplayedChunk(replay, start, len(chunk.token_ids), position, is_last))
            if is_last:
                del self._by_slot[chunk.slot]
        return tuple(replayed)


class ReplayScorer:
    """Finds the tokens that completions are compared with."""

    def __init__(self, ops: Ops, compute_logits: Callable[[Tensor], Tensor]) -> None:
        """`compute_logits` maps hidden states [n, hidden] to logits [n, vocabulary] float32."""
        self._ops = ops
        self._compute_logits = compute_logits

    def score(self, chunks: Sequence[ReplayedChunk], hidden: Tensor) -> Tensor:
        """The most likely tokens after `scoring_tokens`, chunk after chunk: [n] int64, possibly none.

        Args:
            chunks: At least one, from different sequences.
            hidden: [num_tokens, hidden].
        """
        rows = np.concatenate([chunk.scoring_tokens() for chunk in chunks])
        likeliest = torch.empty(len(rows), dtype=torch.int64, device=hidden.device)
        rows_there = to_device(rows, hidden.device)
        for start in range(0, len(rows), _MAX_ROWS):
            part = slice(start, start + _MAX_ROWS)
            likeliest[part] = self._ops.greedy_sample(self._compute_logits(hidden[rows_there[part]]))[0]
        return likeliest


def compare_replays(
    chunks: Sequence[ReplayedChunk], likeliest: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]
) -> tuple[int, int]:
    """How many tokens were compared, and how many of them are not the most likely.

    Args:
        chunks: Of one step. A sequence's steps are compared in their order.
        likeliest: From `ReplayScorer.score`.
        token_ids: [num_tokens].
    """
    num_compared = num_different = end = 0
    for chunk in chunks:
        start, end = end, end + len(chunk.scoring_tokens())
        expected, given = _pairs(chunk, likeliest[start:end].tolist(), token_ids)
        num_compared += len(given)
        num_different += sum(a != b for a, b in zip(expected, given, strict=True))
    return num_compared, num_different


def _pairs(chunk: ReplayedChunk, likeliest: list[int], token_ids: npt.NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """A prediction past the chunk's end is kept for the next one."""
    end = chunk.first_token + chunk.num_tokens
    before = chunk.replay.expected_token
    expected = likeliest if before is None else [before, *likeliest]
    chunk.replay.expected_token = None
    if not chunk.is_last and likeliest:
        chunk.replay.expected_token = expected.pop()
    return expected, token_ids[end - len(expected) : end].tolist()
