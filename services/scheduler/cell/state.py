"""A moment of the cell, for people and dashboards: data only."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.core.batch.step import StepCounts
from services.scheduler.core.policy import SchedulerCounters


@dataclass(frozen=True, slots=True)
class RankState:
    """One DP rank. Without a worker it has no blocks, and nobody. `num_steps` go on counting."""

    rank: int
    is_attached: bool
    num_steps: StepCounts
    num_waiting: int
    num_running: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int


@dataclass(frozen=True, slots=True)
class CellState:
    """The cell: `ready` when any rank is attached; numbers are sums over the ranks.

    `num_waiting` includes those who wait for a rank. `counters` go on counting.
    """

    ready: bool
    num_waiting: int
    num_running: int
    block_size: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    counters: SchedulerCounters
    ranks: tuple[RankState, ...]
    num_suspects: int
