"""Room that several parties share and that none of them can fill.

Pure. Each party has a limit of its own, and all together have a capacity, which only memory needs.
"""

from __future__ import annotations

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
