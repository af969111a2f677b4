"""The order of waiting sequences that have not aged, for each queue policy.

No operation costs more than O(log n) amortised.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import Protocol

from typing_extensions import override

from services.scheduler.core.batch.sequence import Priority, Sequence

# How many sequences LONGEST_PREFIX chooses from. SGLang, which ranks the whole queue, stops ranking above 128.
WINDOW = 64

# A queue is rebuilt once removed entries outnumber the others by this many.
_MIN_LEFT = 64

Key = tuple[float, ...]
"""Sort key, unique within a queue."""

NumCachedTokens = Callable[[Sequence], int]
"""Tokens of a waiting sequence that are cached."""

_by_key: Callable[[tuple[Key, Sequence]], Key] = itemgetter(0)


class SortedQueue:
    """Sequences sorted by a key, the smallest first; any of them can be removed.

    Most are pushed in key order and go to a run, at O(1) each; the others go to a heap. A removed sequence stays there
    until it reaches the front, or about half of all entries are removed ones.

    Invariant: `_keys` holds the sequences in the queue; each is, with its key, in `_heap` or in the sorted `_run`.
    """

    def __init__(self) -> None:
        self._keys: dict[Sequence, Key] = {}
        self._run: deque[tuple[Key, Sequence]] = deque()
        self._heap: list[tuple[Key, Sequence]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._keys

    @property
    def top(self) -> tuple[Key, Sequence]:
        """The smallest key and its sequence; the queue must not be empty."""
        run, heap = self._run, self._heap
        while run and not self._is_in(run[0]):
            run.popleft()
        while heap and not self._is_in(heap[0]):
            heapq.heappop(heap)
        return heap[0] if heap and (not run or heap[0] < run[0]) else run[0]

    def push(self, key: Key, seq: Sequence) -> None:
        """Add a sequence."""
        self._keys[seq] = key
        if not self._run or self._run[-1][0] < key:
            self._run.append((key, seq))
        else:
            heapq.heappush(self._heap, (key, seq))

    def pop(self) -> tuple[Key, Sequence]:
        """Remove and return the top; the queue must not be empty."""
        key, seq = self.top
        self.remove(seq)
        return key, seq

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence from any place."""
        del self._keys[seq]
        if len(self._run) + len(self._heap) > 2 * len(self._keys) + _MIN_LEFT:
            self._run = deque(filter(self._is_in, self._run))
            self._heap = list(filter(self._is_in, self._heap))
            heapq.heapify(self._heap)

    def _is_in(self, item: tuple[Key, Sequence]) -> bool:
        # A sequence that was removed and pushed again has another key.
        return self._keys.get(item[1]) is item[0]


class QueueOrder(Protocol):
    """The order of a queue policy. Keys begin with the arrival time."""

    def __len__(self) -> int: ...

    @property
    def oldest(self) -> tuple[Key, Sequence]:
        """The earliest arrival; the queue must not be empty."""

    def push(self, key: Key, seq: Sequence) -> None:
        """Add a sequence."""

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence from any place."""

    def first(self, now: float, num_cached_tokens: NumCachedTokens) -> Sequence:
        """The next sequence; the queue must not be empty."""


class ArrivalOrder(SortedQueue, QueueOrder):
    """First come, first served."""

    @override
    @property
    def oldest(self) -> tuple[Key, Sequence]:
        return self.top

    @override
    def first(self, now: float, num_cached_tokens: NumCachedTokens) -> Sequence:
        return self.top[1]


class PriorityOrder(QueueOrder):
    """The most urgent class first; by arrival within a class."""

    def __init__(self) -> None:
        self._classes = {priority: SortedQueue() for priority in sorted(Priority)}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._classes.values())

    @override
    @property
    def oldest(self) -> tuple[Key, Sequence]:
        return min(queue.top for queue in self._classes.values() if queue)

    @override
    def push(self, key: Key, seq: Sequence) -> None:
        self._classes[seq.priority].push(key, seq)

    @override
    def remove(self, seq: Sequence) -> None:
        self._classes[seq.priority].remove(seq)

    @override
    def first(self, now: float, num_cached_tokens: NumCachedTokens) -> Sequence:
        return next(queue.top[1] for queue in self._classes.values() if queue)


class PrefixOrder(QueueOrder):
    """The longest cached prefix first, among the earliest arrivals; ties go by arrival.

    The window is ranked at most once for each `now`, so all admissions of a step share a ranking, as in SGLang. The
    choice stays until it leaves, or changing rankings could postpone it for ever.

    Invariant: `_window` is sorted, and all of it arrived before all of `_later`. `_ranking` holds waiting sequences
    other than the choice, the best one last.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._size = window
        self._window: list[tuple[Key, Sequence]] = []
        self._keys: dict[Sequence, Key] = {}
        self._later = SortedQueue()
        self._ranking: list[Sequence] = []
        self._ranked_at: float | None = None
        self._choice: Sequence | None = None

    def __len__(self) -> int:
        return len(self._window) + len(self._later)

    @override
    @property
    def oldest(self) -> tuple[Key, Sequence]:
        return self._window[0] if self._window else self._later.top

    @override
    def push(self, key: Key, seq: Sequence) -> None:
        if not self._window or key > self._window[-1][0]:
            self._later.push(key, seq)
            return
        self._enter_window(key, seq)
        if len(self._window) > self._size:
            last_key, last = self._window.pop()
            del self._keys[last]
            self._later.push(last_key, last)

    @override
    def remove(self, seq: Sequence) -> None:
        key = self._keys.pop(seq, None)
        if key is None:
            self._later.remove(seq)
        else:
            del self._window[bisect_left(self._window, key, key=_by_key)]
        if seq is self._choice:
            self._choice = None
        elif seq in self._ranking:
            self._ranking.remove(seq)

    @override
    def first(self, now: float, num_cached_tokens: NumCachedTokens) -> Sequence:
        if self._choice is None:
            if now != self._ranked_at or not self._ranking:
                self._rank(num_cached_tokens)
                self._ranked_at = now
            self._choice = self._ranking.pop()
        return self._choice

    def _rank(self, num_cached_tokens: NumCachedTokens) -> None:
        while self._later and len(self._window) < self._size:
            self._enter_window(*self._later.pop())
        # The sort is stable: among equals, the first to arrive stays last.
        self._ranking = sorted((seq for _, seq in reversed(self._window)), key=num_cached_tokens)

    def _enter_window(self, key: Key, seq: Sequence) -> None:
        self._keys[seq] = key
        insort(self._window, (key, seq), key=_by_key)
