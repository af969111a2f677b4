"""The place of a process among those that serve one model. Must not import torch: settings are checked with it."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The place of a process.

    A model replica's ranks are a TP group and a failure domain. With expert parallelism collectives span all ranks of
    the cell, which then are one failure domain.
    """

    dp_rank: int = 0
    dp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    has_expert_parallel: bool = False
    fits_any_place: bool = False
    """Whether the TP group may be any DP rank of a cell that is not coupled; `dp_rank` is then 0 of 1."""

    @property
    def is_leader(self) -> bool:
        """Whether the scheduler talks to the TP group through this process."""
        return not self.tp_rank

    @property
    def ep_rank(self) -> int:
        """Rank in the cell; experts are placed by it."""
        return self.dp_rank * self.tp_size + self.tp_rank

    @property
    def ep_size(self) -> int:
        """Ranks in the cell."""
        return self.dp_size * self.tp_size

    @property
    def is_coupled(self) -> bool:
        """Whether collectives span DP ranks."""
        return self.has_expert_parallel and self.dp_size > 1

    @property
    def is_alone(self) -> bool:
        """Whether it is a failure domain by itself."""
        return self.tp_size == 1 and not self.is_coupled

    @property
    def follows(self) -> bool:
        """Whether it joins a leader: a member its group's, a coupled group's leader that of DP rank 0."""
        return not self.is_leader or (self.is_coupled and self.dp_rank > 0)

    def followers(self) -> frozenset[RankLayout]:
        """The processes that join this one."""
        if not self.is_leader:
            return frozenset()
        members = [replace(self, tp_rank=rank) for rank in range(1, self.tp_size)]
        leaders = [replace(self, dp_rank=rank) for rank in range(1, self.dp_size)] if self._leads_all else []
        return frozenset([*members, *leaders])

    @property
    def _leads_all(self) -> bool:
        return self.is_coupled and self.dp_rank == 0
