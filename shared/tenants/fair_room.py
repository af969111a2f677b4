"""Room that several parties share and that none of them can fill.

Pure. Each party has a limit of its own, and all together have a capacity, which only memory needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# How many times what is free one party may hold: one that comes alone gets 4/5 of a capacity, n of them leave
# 1 / (1 + 4 * n) of it free.
_SHARE = 4


def limit_of_party(limit: int, *, capacity: int, num_taken: int) -> int:
    """The most that a party may hold with a newcomer: its own limit, or four times what the newcomer leaves free.

    So whoever fills its part leaves room for others. A limit that others have lowered meanwhile takes nothing from what
    was let in before.

    Source: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches" (IEEE/ACM
    Transactions on Networking 6(2), 1998), section III.

    Args:
        limit: The party's own.
        capacity: What all parties together may hold.
        num_taken: What they hold with the newcomer.
    """
    return min(limit, _SHARE * max(0, capacity - num_taken))


class FairRoom:
    """What parties have in a room.

    Invariant: a party is here while it has anything.
    """

    def __init__(self, limit: int, *, capacity: int) -> None:
        """See `limit_of_party`."""
        self._limit = limit
        self._capacity = capacity
        self._party_to_size: dict[str, int] = {}
        self._num_taken = 0

    def size_of(self, party: str) -> int:
        """What a party has."""
        return self._party_to_size.get(party, 0)

    def has_room(self, party: str, size: int) -> bool:
        """Whether a newcomer may enter; one of a party that has nothing may be of any size, while any room is free."""
        num_own = self.size_of(party)
        if not num_own:
            return self._num_taken < self._capacity
        return num_own + size <= limit_of_party(self._limit, capacity=self._capacity, num_taken=self._num_taken + size)

    @contextmanager
    def enter(self, party: str, size: int = 1) -> Iterator[None]:
        """Count a newcomer inside the `with` block."""
        self._party_to_size[party] = self.size_of(party) + size
        self._num_taken += size
        try:
            yield
        finally:
            self._num_taken -= size
            self._party_to_size[party] -= size
            if not self._party_to_size[party]:
                del self._party_to_size[party]
