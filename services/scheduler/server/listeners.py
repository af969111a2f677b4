"""The scheduler's two servers."""

from __future__ import annotations

import grpc

from services.scheduler.config import SchedulerSettings
from services.scheduler.server.cell_server import CellServer
from services.scheduler.server.servicer import (
    ADMIN_SERVICE,
    EXCHANGE_SERVICE,
    SCHEDULER_SERVICE,
    ExchangeServicer,
    SchedulerAdminServicer,
    SchedulerServicer,
)
from shared.network.health import Health
from shared.network.rpc import MAX_CELL_CONNECTIONS, MAX_CONNECTIONS, ServerLimits, make_server
from shared.process.open_files import share_open_files

PUBLIC_SERVICES = (SCHEDULER_SERVICE,)
CELL_SERVICES = (EXCHANGE_SERVICE, ADMIN_SERVICE, SCHEDULER_SERVICE)


def make_servers(settings: SchedulerSettings, cell: CellServer, health: Health) -> tuple[grpc.aio.Server, ...]:
    """Make the servers of the client port and of the cell port, not started; the client port has `health`.

    Direct clients cannot reach the methods of the cell's own processes and operators, nor these those.

    Raises:
        RuntimeError: an address is not usable.
    """
    scheduler = SchedulerServicer(cell, settings.max_unread_s)
    num_client_connections, num_cell_connections = share_open_files(MAX_CONNECTIONS, MAX_CELL_CONNECTIONS)
    public = make_server(
        settings.bind_address,
        [scheduler, health],
        service_names=PUBLIC_SERVICES if settings.reflection else (),
        certificates=settings.certificates,
        limits=ServerLimits(
            max_connections=num_client_connections,
            max_connection_age_s=settings.max_connection_age_s,
            client_keys=settings.keys,
        ),
    )
    internal = make_server(
        settings.cell_bind_address,
        [ExchangeServicer(cell), SchedulerAdminServicer(cell), scheduler, health.make_follower(CELL_SERVICES)],
        internal=True,
        service_names=CELL_SERVICES if settings.reflection else (),
        certificates=settings.certificates,
        limits=ServerLimits(max_connections=num_cell_connections),
    )
    return public, internal
