"""The ranks of a failure domain that one launcher starts: their places, leaders and flags.

    node 0: ranks 0 1 2 3     node 1: ranks 4 5 6 7     rank = dp_rank * tp + tp_rank

A member of a TP group joins its group's leader. In a coupled cell, whose domain has all groups, the other leaders join
rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from services.cli.processes.manage_flag import number_manage_address
from services.cli.processes.service_command import ServiceCommand
from shared.process.cores import num_usable_cores


@dataclass(frozen=True, slots=True)
class RankDomain:
    """The ranks of one failure domain, numbered from 0."""

    tp: int
    dp: int
    """Replicas in the cell."""
    has_expert_parallel: bool
    dp_rank: int | None = None
    """Which replica it is; None if any, or if the domain has all of them."""

    @property
    def is_coupled(self) -> bool:
        """Whether it has all replicas of the cell."""
        return self.has_expert_parallel and self.dp > 1

    @property
    def num_ranks(self) -> int:
        """Number of processes, on all nodes."""
        return self.tp * (self.dp if self.is_coupled else 1)

    def leader_of(self, rank: int) -> int | None:
        """The rank that it joins; None for rank 0."""
        leader = rank - rank % self.tp
        return leader if leader != rank else 0 if rank else None

    def name_of(self, rank: int) -> str:
        """`DP.TP`; empty where the cell has a single rank."""
        if self.dp * self.tp == 1:
            return ""
        dp_rank = self.dp_rank_of(rank)
        return f"{0 if dp_rank is None else dp_rank}.{rank % self.tp}"

    def dp_rank_of(self, rank: int) -> int | None:
        """Its place among the cell's replicas; None if any."""
        return rank // self.tp if self.is_coupled else self.dp_rank

    def flags_of(self, rank: int) -> list[str]:
        """The worker's flags about its place."""
        flags = ["--ep"] if self.has_expert_parallel else []
        if self.dp * self.tp == 1:
            return flags
        dp_rank = self.dp_rank_of(rank)
        if dp_rank is not None:
            flags.append(f"--dp-rank={dp_rank}")
        return [*flags, f"--dp-size={self.dp}", f"--tp-rank={rank % self.tp}", f"--tp-size={self.tp}"]


@dataclass(frozen=True, slots=True)
class RankNode:
    """What one launcher starts of a domain."""

    ranks: range
    address_of: Callable[[int], str]
    """Where this node's processes reach a rank; asked for its own ranks and for their leaders."""
    listen_flag_of: Callable[[int], str]
    """The flag with which a rank of this node listens."""
    name: str
    """The domain's, for the supervisor."""
    first_device: int = 0
    """Device of the first rank."""
    flag_to_own: Mapping[str, str] = field(default_factory=dict)
    """See `ServiceCommand`."""


def plan_ranks(domain: RankDomain, node: RankNode, flags: Sequence[str]) -> Iterator[ServiceCommand]:
    """The commands of a node's ranks; `flags` are those of all, and may name a management address to be numbered."""
    for device, rank in enumerate(node.ranks, node.first_device):
        name = domain.name_of(rank)
        own_flags = [node.listen_flag_of(rank), *domain.flags_of(rank)]
        if name:
            own_flags.append(f"--device-index={device}")
        leader = domain.leader_of(rank)
        if leader is not None:
            own_flags.append(f"--leader={node.address_of(leader)}")
        numbered = number_manage_address(flags, device, name) if name else flags
        all_flags = (*own_flags, *numbered)
        yield ServiceCommand("worker", all_flags, node.address_of(rank), node.name, name, flag_to_own=node.flag_to_own)


def share_cores(flags: Sequence[str], num_ranks: int) -> list[str]:
    """The worker's flags with this machine's cores shared out among its ranks, unless they say a number of threads."""
    if num_ranks == 1 or any(flag.partition("=")[0] == "--num-threads" for flag in flags):
        return list(flags)
    return [f"--num-threads={max(1, num_usable_cores() // num_ranks)}", *flags]
