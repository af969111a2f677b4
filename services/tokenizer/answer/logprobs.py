"""Log-probabilities, in columns as the cell sends them, and as a client's messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from lockstep.v1 import common_pb2

# Takes half a millisecond to make, and stays far below the limit on a client's message.
_ENTRIES_PER_RESPONSE = 512


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Log-probabilities in columns.

    Position i has the entries `bounds[i]` to `bounds[i + 1]`: its own token, the requested ones, the likeliest ones.
    The ranks of its own token and of the requested ones are at `rank_bounds[i]` to `rank_bounds[i + 1]`.
    """

    indexes: npt.NDArray[np.int32]  # [num_positions]
    rank_bounds: npt.NDArray[np.int64]  # [num_positions + 1]
    ranks: npt.NDArray[np.int32]  # [num_ranks]
    bounds: npt.NDArray[np.int64]  # [num_positions + 1]
    token_ids: npt.NDArray[np.int32]  # [num_entries]
    values: npt.NDArray[np.float32]  # [num_entries]

    def __len__(self) -> int:
        return len(self.indexes)

    def part(self, start: int, end: int) -> LogprobColumns:
        """Positions `start` to before `end`, as views."""
        indexes, bounds = self.indexes[start:end], self.bounds[start : end + 1]
        return LogprobColumns(
            indexes, self.rank_bounds[start : end + 1], self.ranks, bounds, self.token_ids, self.values
        )

    def last(self, num_positions: int) -> LogprobColumns:
        """The last positions, as views."""
        return self.part(len(self) - num_positions, len(self))

    def messages(self, bytes_of: Callable[[int], bytes]) -> Iterator[common_pb2.PositionLogprobs]:
        """One client message per position; `bytes_of` returns a token's bytes."""
        first, last = int(self.bounds[0]), int(self.bounds[-1])
        entries = [
            _token_message(token_id, value, bytes_of(token_id))
            for token_id, value in zip(
                self.token_ids[first:last].tolist(), self.values[first:last].tolist(), strict=True
            )
        ]
        first_rank, last_rank = int(self.rank_bounds[0]), int(self.rank_bounds[-1])
        ranks = self.ranks[first_rank:last_rank].tolist()
        bounds, rank_bounds = (self.bounds - first).tolist(), (self.rank_bounds - first_rank).tolist()
        for (start, end), rank_range in zip(pairwise(bounds), pairwise(rank_bounds), strict=True):
            own_ranks = ranks[slice(*rank_range)]
            own, top = entries[start : start + len(own_ranks)], entries[start + len(own_ranks) : end]
            for rank, entry in chain(zip(own_ranks, own, strict=True), enumerate(top, start=1)):
                entry.rank = rank
            yield common_pb2.PositionLogprobs(token=own[0], top=top, requested=own[1:])


class LogprobQueue:
    """Log-probabilities received and not sent yet, in order."""

    def __init__(self, num_entries: int, bytes_of: Callable[[int], bytes]) -> None:
        """`num_entries` is the number of entries per position, at least 1."""
        # The most positions that one response holds.
        self.max_positions = max(1, _ENTRIES_PER_RESPONSE // num_entries)
        self._bytes_of = bytes_of
        self._parts: deque[LogprobColumns] = deque()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def put(self, logprobs: LogprobColumns) -> None:
        """Append the next positions, at least one."""
        self._parts.append(logprobs)

    def take(self, num_positions: int) -> Iterator[common_pb2.PositionLogprobs]:
        """Remove at most `num_positions` positions; their messages are only made here."""
        while num_positions and self._parts:
            part = self._parts.popleft()
            if len(part) > num_positions:
                self._parts.appendleft(part.part(num_positions, len(part)))
                part = part.part(0, num_positions)
            num_positions -= len(part)
            yield from part.messages(self._bytes_of)


def _token_message(token_id: int, logprob: float, data: bytes) -> common_pb2.TokenLogprob:
    try:
        return common_pb2.TokenLogprob(token_id=token_id, logprob=logprob, text=data.decode())
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        return common_pb2.TokenLogprob(token_id=token_id, logprob=logprob, text=text, raw_bytes=data)
