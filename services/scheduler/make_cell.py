"""Makes the cell of a scheduler process."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from lockstep.internal.v1 import worker_pb2
from services.scheduler.cell.attach import DomainAttach, SchedulerClaim
from services.scheduler.cell.engine import Engine
from services.scheduler.cell.events import Event, Exit
from services.scheduler.config import SchedulerSettings
from services.scheduler.server.cell_server import CellServer
from services.scheduler.server.failpoint import SubmitFailpoint
from services.scheduler.workers.domain_client import DomainClient
from shared.health import Health
from shared.rpc import make_channel, make_peer
from shared.tls import Role


def make_cell(settings: SchedulerSettings, instance_id: str, health: Health) -> CellServer:
    """Make the cell in the running event loop; no worker is attached yet."""
    topology = settings.topology
    claim = SchedulerClaim(instance_id, topology.dp_size, random.SystemRandom().random)
    attach_request = worker_pb2.AttachRequest(
        scheduler_instance_id=instance_id,
        block_size=settings.kv_cache_block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.policy.max_num_batched_tokens,
        drain_time=timedelta(seconds=settings.drain_s),
    )

    connect = partial(make_channel, internal=True, peer=make_peer(settings.certificates, Role.WORKER))

    def link_domain(domain: int, on_event: Callable[[Event], None], on_exit: Callable[[Exit], None]) -> DomainClient:
        return DomainClient(
            DomainAttach(domain, topology, claim),
            {rank: settings.workers[rank] for rank in topology.ranks_of(domain)},
            attach_request,
            connect=connect,
            on_event=on_event,
            on_exit=on_exit,
        )

    return CellServer(
        Engine(settings.policy, settings.cache, topology),
        link_domain,
        instance_id=instance_id,
        health=health,
        replica_silence_s=settings.worker_silence_s,
        failpoint=None if settings.fail_on_token is None else SubmitFailpoint(settings.fail_on_token),
    )
