"""Run the scheduler service: `python -m services.scheduler --help`."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import uuid

from services.scheduler.config import SchedulerSettings
from services.scheduler.discovery.last_seen import LastSeen
from services.scheduler.make_cell import make_cell
from services.scheduler.metrics import make_registry
from services.scheduler.server.cell_server import CellServer
from services.scheduler.server.listeners import PUBLIC_SERVICES, make_servers
from shared.config import load_settings, log_settings
from shared.network.health import Health
from shared.network.management import serve_management
from shared.network.probes import Probes
from shared.process.lifecycle import StopRequest, collect_garbage_between_steps, freeze_garbage, run_service
from shared.process.logging import configure_logging

logger = logging.getLogger(__name__)

# Time for the last messages to clients.
_STOP_GRACE_S = 0.5


async def serve(settings: SchedulerSettings, stop: StopRequest) -> int:
    """Serve until `stop` is set and no replica drains, or the cell fails; returns the exit code."""
    health, probes = Health(PUBLIC_SERVICES), Probes("starting")
    last_seen = LastSeen(time.monotonic())
    cell = make_cell(settings, uuid.uuid4().hex, health, last_seen)
    try:
        servers = make_servers(settings, cell, health)
        is_discovered = settings.topology.is_dynamic
        registry = make_registry(
            cell.engine, cell.idle_check, settings.certificates, last_seen if is_discovered else None, settings.keys
        )
        management = await serve_management(settings.manage_listen, registry, probes)
    except RuntimeError as error:
        logger.error("cannot serve", extra={"error": str(error)})
        return 1
    for server in servers:
        await server.start()
    # A scheduler without workers is ready too: requests wait in its queue.
    probes.set_started()
    logger.info("serving", extra={"address": settings.bind_address, "cell_address": settings.cell_bind_address})
    freeze_garbage()
    tasks = [cell.run_worker_links(), collect_garbage_between_steps(cell.is_idle), stop.wait(), cell.failed.wait()]
    ends = [asyncio.create_task(task) for task in tasks]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    probes.is_leaving = True
    if stop.is_set():
        await _stay(settings, cell, stop)
        await cell.release_workers()
    # Whatever is still waiting ends by cancellation; an exception in a task that ended by itself is a bug.
    cell.close()
    for task in ends:
        task.cancel()
    results = await asyncio.gather(*ends, return_exceptions=True)
    await asyncio.gather(*(server.stop(_STOP_GRACE_S) for server in servers))
    if management is not None:
        management.close()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return 1 if cell.failed.is_set() else 0


async def _stay(settings: SchedulerSettings, cell: CellServer, stop: StopRequest) -> None:
    """Serve on for replicas that drain."""
    waits = (cell.replica_drains.stay(settings.drain_s), stop.is_urgent.wait(), cell.failed.wait())
    ends = [asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in ends:
        task.cancel()


def main() -> int:
    """Run the service; returns the exit code."""
    settings = load_settings(SchedulerSettings)
    configure_logging(service="scheduler", level=settings.log_level, log_format=settings.log_format)
    log_settings(settings)
    if settings.insecure_cell_bind is not None:
        logger.warning("serving the cell without encryption", extra={"address": settings.insecure_cell_bind})
    return run_service(lambda stop: serve(settings, stop))


if __name__ == "__main__":
    sys.exit(main())
