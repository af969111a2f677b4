"""A snapshot of the cell, for people and dashboards: data only."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.cell.domains.history import CellEvent
from services.scheduler.core.batch.step import StepCounts
from services.scheduler.core.policy import SchedulerCounters
from shared.ids import DpRank


@dataclass(frozen=True, slots=True)
class RankState:
    """Without a worker a rank has no blocks and no sequences. `num_steps` is cumulative."""

    rank: DpRank
    is_vacant: bool
    """Whether it is a place that no endpoint has."""
    is_attached: bool
    is_draining: bool
    """Takes no new sequences."""
    num_steps: StepCounts
    num_waiting: int
    num_running: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_checkpoints: int
    """Recurrent states that its worker can save; 0 for models without any."""
    num_used_checkpoints: int


@dataclass(frozen=True, slots=True)
class CellState:
    """`ready` when any rank is attached, or where ranks are coupled all of them. Numbers are sums over the ranks.

    `num_waiting` includes unplaced sequences; `counters` are cumulative.
    """

    ready: bool
    takes_work: bool
    """Whether any rank takes requests that are not suspects; see `Engine.takes_work`."""
    num_waiting: int
    num_running: int
    block_size: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_checkpoints: int
    num_used_checkpoints: int
    counters: SchedulerCounters
    ranks: tuple[RankState, ...]
    num_suspects: int
    events: tuple[CellEvent, ...]
    """The last ones, oldest first."""
