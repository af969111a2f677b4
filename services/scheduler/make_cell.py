"""Makes the cell of a scheduler process."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

from lockstep.internal.v1 import worker_pb2
from services.scheduler.cell.domains.attach import DomainAttach
from services.scheduler.cell.domains.scheduler_claim import SchedulerClaim
from services.scheduler.cell.engine import Engine
from services.scheduler.cell.events import Event, Exit
from services.scheduler.config import SchedulerSettings
from services.scheduler.discovery.dns import DnsDiscovery
from services.scheduler.discovery.kubernetes_discovery import KubernetesDiscovery
from services.scheduler.discovery.last_seen import LastSeen
from services.scheduler.discovery.watch_messages import WatchTask
from services.scheduler.server.cell_server import CellServer
from services.scheduler.server.failpoint import SubmitFailpoint
from services.scheduler.server.worker_links import Discovery, WorkerAccess
from services.scheduler.workers.domain_client import DomainClient
from shared.network.health import Health
from shared.network.rpc import make_channel, make_peer
from shared.network.tls import Role
from shared.wire import introduce_self


def make_cell(settings: SchedulerSettings, instance_id: str, health: Health, last_seen: LastSeen) -> CellServer:
    """Make the cell in the running event loop; no worker is attached yet.

    Args:
        last_seen: Filled by discovery, if the workers are discovered.
    """
    topology = settings.topology
    claim = SchedulerClaim(instance_id, random.SystemRandom().random)
    attach_request = worker_pb2.AttachRequest(
        scheduler_instance_id=instance_id,
        block_size=settings.kv_cache_block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.policy.max_num_batched_tokens,
        drain_time=timedelta(seconds=settings.drain_s),
        introduction=introduce_self().encode(),
    )

    connect = partial(make_channel, internal=True, peer=make_peer(settings.certificates, Role.WORKER))

    def link_domain(
        domain: int, addresses: Sequence[str], on_event: Callable[[Event], None], on_exit: Callable[[Exit], None]
    ) -> DomainClient:
        return DomainClient(
            DomainAttach(domain, topology, claim),
            dict(zip(topology.ranks_of(domain), addresses, strict=True)),
            attach_request,
            connect=connect,
            on_event=on_event,
            on_exit=on_exit,
        )

    return CellServer(
        Engine(settings.policy, settings.cache, topology),
        WorkerAccess(link_domain, _make_discovery(settings, last_seen) if topology.is_dynamic else settings.workers),
        instance_id=instance_id,
        health=health,
        replica_silence_s=settings.worker_silence_s,
        failpoint=None if settings.fail_on_token is None else SubmitFailpoint(settings.fail_on_token),
    )


def _make_discovery(settings: SchedulerSettings, last_seen: LastSeen) -> Discovery:
    if settings.discovery_name is not None:
        return DnsDiscovery(settings.discovery_name, settings.discovery_period, last_seen)
    assert settings.discovery_service is not None
    assert settings.discovery_port is not None
    task = WatchTask(
        api_server=settings.discovery_api_server,
        service_account=str(settings.discovery_service_account),
        namespace=settings.namespace,
        service=settings.discovery_service,
        port=settings.discovery_port,
        period_s=settings.discovery_period,
        parent_pid=os.getpid(),
    )
    return KubernetesDiscovery(task, last_seen)
