"""How often a completion that is computed again comes out as it was given: the price of recovering without exactness.

A sequence that comes back brings its completion, and computing its KV again gives the logits of every token of it. For
greedy sequences each token's logits should be largest at the token; the last ones of each are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.ops import Ops
from services.worker.step import EnteringSequence, Int32Column, PrefillChunk

# Tokens of one sequence that are compared.
_MAX_TOKENS = 64
# Bounds the logits that exist at once: 128 rows of a vocabulary of 128k are 64 MiB.
_MAX_ROWS = 128


@dataclass(slots=True)
class Replay:
    """A completion that is computed again, chunk by chunk."""

    # Tokens from this position on are compared.
    first_position: int
    # The likeliest token behind the last chunk, where that is to be compared.
    expected_token: int | None = None


@dataclass(frozen=True, slots=True)
class ReplayedChunk:
    """A step's tokens of such a sequence."""

    replay: Replay
    first_token: int  # where they begin among the step's tokens
    num_tokens: int  # at least 1
    position: int  # of the first one
    is_last: bool  # whether no token of the sequence comes behind them

    def scoring_tokens(self) -> npt.NDArray[np.int64]:
        """The tokens, among the step's, whose logits are another one's that is compared."""
        start = max(self.replay.first_position - 1 - self.position, 0)
        return np.arange(self.first_token + start, self.first_token + self.num_tokens - self.is_last)


class Replays:
    """The sequences of a batch, by slot, whose completions are computed again."""

    def __init__(self) -> None:
        """Begin with none."""
        self._by_slot: dict[int, Replay] = {}

    def __bool__(self) -> bool:
        return bool(self._by_slot)

    def enter(self, enter: EnteringSequence) -> None:
        """A greedy sequence enters, whose logits nothing changes; whatever was in its slot has left."""
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
        """Those of a step's chunks that are compared; a sequence is forgotten with its last one.

        Args:
            chunks: The step's, of different slots.
            positions: [len(chunks)], each one's first token's in its sequence.
            starts: [len(chunks)], where its tokens begin among the step's.
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
    """Compares what is likeliest with what was given."""

    def __init__(self, ops: Ops, compute_logits: Callable[[Tensor], Tensor]) -> None:
        """Score by logits [n, vocabulary] float32 of hidden states [n, hidden]."""
        self._ops = ops
        self._compute_logits = compute_logits

    def score(
        self, chunks: Sequence[ReplayedChunk], token_ids: npt.NDArray[np.int64], hidden: Tensor
    ) -> tuple[int, int]:
        """Compare one step's tokens.

        Args:
            chunks: Of different sequences, at least one.
            token_ids: [num_tokens], the step's.
            hidden: [num_tokens, hidden], what the model computed for them.

        Returns:
            How many tokens were compared, and how many of them are not the likeliest.
        """
        rows = [chunk.scoring_tokens() for chunk in chunks]
        likeliest = self._likeliest(hidden, np.concatenate(rows))
        num_compared = num_different = end = 0
        for chunk, chunk_rows in zip(chunks, rows, strict=True):
            start, end = end, end + len(chunk_rows)
            expected, given = _pairs(chunk, likeliest[start:end].tolist(), token_ids)
            num_compared += len(given)
            num_different += sum(a != b for a, b in zip(expected, given, strict=True))
        return num_compared, num_different

    def _likeliest(self, hidden: Tensor, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The likeliest token behind each of `rows`."""
        likeliest = np.empty(len(rows), np.int64)
        for start in range(0, len(rows), _MAX_ROWS):
            part = slice(start, start + _MAX_ROWS)
            logits = self._compute_logits(hidden[torch.from_numpy(rows[part])])
            likeliest[part] = self._ops.greedy_sample(logits)[0].numpy()
        return likeliest


def _pairs(chunk: ReplayedChunk, likeliest: list[int], token_ids: npt.NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """The likeliest tokens of a chunk's places and the given ones; what is behind the chunk waits for the next one."""
    end = chunk.first_token + chunk.num_tokens
    before = chunk.replay.expected_token
    expected = likeliest if before is None else [before, *likeliest]
    chunk.replay.expected_token = None
    if not chunk.is_last and likeliest:
        chunk.replay.expected_token = expected.pop()
    return expected, token_ids[end - len(expected) : end].tolist()
