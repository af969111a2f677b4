"""How long the loss of an epoch delays requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from services.scheduler.cell.domains.history import EventKind, History
from services.scheduler.core.batch.sequence import Sequence
from services.scheduler.core.policy import RECOVERY_BUCKETS_S, SchedulerCounters


@dataclass(slots=True)
class _Recovery:
    lost_at: float
    num_left: int


class Recoveries:
    """Measures the time from the loss of an epoch until each sequence it computed has another token or has ended.

    A sequence lost again before that counts only for the first loss.
    """

    def __init__(self, counters: SchedulerCounters, history: History) -> None:
        self._counters = counters
        self._history = history
        self._recoveries: dict[Sequence, _Recovery] = {}

    def __bool__(self) -> bool:
        return bool(self._recoveries)

    def begin(self, computed: Iterable[Sequence], now: float) -> None:
        """An epoch that computed these sequences was lost."""
        held_up = [seq for seq in computed if seq not in self._recoveries]
        self._recoveries.update(dict.fromkeys(held_up, _Recovery(now, len(held_up))))

    def note(self, sequences: Iterable[Sequence], now: float) -> None:
        """These sequences, affected or not, got a token or ended."""
        for seq in sequences:
            recovery = self._recoveries.pop(seq, None)
            if recovery is not None:
                recovery.num_left -= 1
                if not recovery.num_left:
                    self._count(now - recovery.lost_at, now)

    def _count(self, duration_s: float, now: float) -> None:
        self._counters.num_recoveries += 1
        self._counters.recovery_s += duration_s
        self._counters.recoveries_by_s[bisect_left(RECOVERY_BUCKETS_S, duration_s)] += 1
        self._history.record(EventKind.RESUMED, now, duration_s=duration_s)
