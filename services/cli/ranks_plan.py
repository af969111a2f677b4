"""The processes of `lockstep ranks`: one node's ranks of one failure domain."""

from __future__ import annotations

from collections.abc import Sequence

from services.cli.processes.manage_flag import number_address
from services.cli.processes.rank_plan import RankNode, plan_ranks, share_cores
from services.cli.processes.service_command import ServiceCommand
from services.cli.ranks_settings import RanksSettings
from shared.network.addresses import join_address, split_address, strip_brackets

_LOOPBACK = "127.0.0.1"
# The name of a cell's only rank.
ONLY_RANK = "0.0"
_OWN_FLAGS = {flag: flag for flag in ("--listen", "--insecure-bind", "--manage-listen")}


def plan_node(settings: RanksSettings, worker_flags: Sequence[str]) -> list[ServiceCommand]:
    """A node's commands in start order; `worker_flags` are passed on unread."""
    domain, num_ranks = settings.domain, settings.num_local_ranks
    first = settings.node_rank * num_ranks
    here = _own_address(settings)

    def address_of(rank: int) -> str:
        if rank < first:
            # Only leaders are asked for, and those of other nodes are on the first.
            return number_address(_first_address(settings), rank, domain.name_of(rank))
        return number_address(here, rank - first, domain.name_of(rank) or ONLY_RANK)

    def listen_flag_of(rank: int) -> str:
        name = "listen" if settings.insecure_bind is None else "insecure-bind"
        return f"--{name}={number_address(settings.bind_address, rank - first, domain.name_of(rank) or ONLY_RANK)}"

    flags = [*settings.shared_flags(), *_manage_flags(settings), *_collective_flags(settings, worker_flags)]
    node = RankNode(range(first, first + num_ranks), address_of, listen_flag_of, name="ranks", flag_to_own=_OWN_FLAGS)
    return list(plan_ranks(domain, node, [*flags, *share_cores(worker_flags, num_ranks)]))


def _own_address(settings: RanksSettings) -> str:
    """Where this node's ranks find its first one."""
    if not settings.listens_everywhere:
        return settings.bind_address
    return join_address(_LOOPBACK, split_address(settings.bind_address)[1])


def _first_address(settings: RanksSettings) -> str:
    """Where other nodes' ranks find the domain's first one."""
    return f"{settings.first_node}:{split_address(settings.bind_address)[1]}"


def _manage_flags(settings: RanksSettings) -> list[str]:
    """Where the first rank serves metrics and probes: after the launcher."""
    if settings.manage_listen is None:
        return []
    # A socket's path is numbered with the rank.
    return [f"--manage-listen={number_address(settings.manage_listen, 1, 'rank')}"]


def _collective_flags(settings: RanksSettings, worker_flags: Sequence[str]) -> list[str]:
    """The first rank's address for collectives, where it does not follow from what it listens on."""
    is_given = any(flag.partition("=")[0] == "--collective-host" for flag in worker_flags)
    if is_given or settings.node_rank or not settings.listens_everywhere:
        return []
    return [f"--collective-host={strip_brackets(settings.first_node or _LOOPBACK)}"]
