"""Finds the one among many requests that crashes a process, by trying halves of the suspects alone."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

# A suspect that was alone in this many crashes, without being cleared in between, is guilty.
_MAX_CRASHES_ALONE = 2

_Suspect = TypeVar("_Suspect", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Group(Generic[_Suspect]):
    """Suspects that are tried together; they have been waiting since `since`."""

    suspects: list[_Suspect]
    since: float


class Bisection(Generic[_Suspect]):
    """The groups of suspects that wait to be tried, and how often each suspect has crashed alone.

    A crash splits its suspects into two groups, which are tried one after the other. So the guilty one among n is known
    after at most 2 + ⌈log2(n)⌉ crashes, including the one that made them suspects:

                 crashed      waiting afterwards
        crash 1  A B C D      A B    C D
        crash 2  A B          A    B    C D
        crash 3  A            A    B    C D
        crash 4  A: guilty    B    C D

    The caller takes the next group, tries it alone, and reports a crash, clears its suspects, or puts it back.

    Invariant: a suspect is in at most one waiting group.

    Source: delta debugging, Zeller and Hildebrandt, IEEE TSE 28(2), 2002.
    """

    def __init__(self) -> None:
        self._groups: deque[Group[_Suspect]] = deque()
        self._num_crashes_alone: Counter[_Suspect] = Counter()

    def __iter__(self) -> Iterator[Group[_Suspect]]:
        """The waiting groups, the next one first."""
        return iter(self._groups)

    @property
    def next_group(self) -> Group[_Suspect] | None:
        """The group to try next; None when no group is waiting."""
        return self._groups[0] if self._groups else None

    def take(self) -> Group[_Suspect]:
        """Remove and return the next group, to try it."""
        return self._groups.popleft()

    def put_back(self, suspects: list[_Suspect], now: float) -> None:
        """Queue suspects first, as one group; does nothing if there are none."""
        if suspects:
            self._groups.appendleft(Group(suspects, now))

    def crash(self, suspects: Sequence[_Suspect], now: float) -> _Suspect | None:
        """These suspects, none of which is in a waiting group, crashed together: queue their halves first.

        Returns:
            The guilty one, which is forgotten; None while it is not known.
        """
        if len(suspects) == 1:
            self._num_crashes_alone[suspects[0]] += 1
            if self._num_crashes_alone[suspects[0]] == _MAX_CRASHES_ALONE:
                del self._num_crashes_alone[suspects[0]]
                return suspects[0]
        half = (len(suspects) + 1) // 2
        self.put_back(list(suspects[half:]), now)
        self.put_back(list(suspects[:half]), now)
        return None

    def clear(self, innocent: Set[_Suspect]) -> None:
        """Forget suspects, including the ones that are being tried."""
        if not innocent.isdisjoint(suspect for group in self._groups for suspect in group.suspects):
            groups = ((without(group.suspects, innocent), group.since) for group in self._groups)
            self._groups = deque(Group(left, since) for left, since in groups if left)
        for suspect in innocent:
            del self._num_crashes_alone[suspect]


def without(suspects: list[_Suspect], innocent: Set[_Suspect]) -> list[_Suspect]:
    """The suspects that are not innocent, in their order."""
    return [suspect for suspect in suspects if suspect not in innocent]
