"""`lockstep ranks`: one node's ranks of one failure domain, as processes that end and start together."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from services.cli.flags.config_file import load_config_file
from services.cli.launcher_settings import flags_of_roles
from services.cli.processes.cell_processes import CellProcesses
from services.cli.processes.display import LogDisplay, ProcessesOutput
from services.cli.processes.preflight import RefusedError, check_commands, check_packages
from services.cli.processes.service_command import Listener, ServiceCommand
from services.cli.processes.supervisor import RestartPolicy
from services.cli.ranks_plan import ONLY_RANK, plan_node
from services.cli.ranks_settings import RanksSettings, split_worker_flags
from shared.config import load_settings, log_settings
from shared.model_files.model_dir import CONFIG
from shared.network.management import serve_management
from shared.network.probes import Probes
from shared.network.rpc import make_peer
from shared.network.tls import Role
from shared.process.lifecycle import SAME_STOP_S, StopRequest, run_service
from shared.process.line_writer import LineWriter
from shared.process.logging import configure_logging
from shared.process.metrics import make_process_registry

logger = logging.getLogger(__name__)

_NOT_SERVING = "not every rank serves"


def main(argv: Sequence[str]) -> int:
    """Keep the ranks running until asked to stop; returns 0 if all stopped cleanly, else a failed rank's exit code."""
    try:
        file = load_config_file(argv, RanksSettings, ["worker"])
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    own_args, worker_flags = split_worker_flags([*file.service_flags, *argv])
    if not {"--help", "--h"}.isdisjoint(worker_flags):
        return subprocess.run([sys.executable, "-m", "services.worker.config", "--help"], check=False).returncode
    settings = load_settings(RanksSettings, own_args, more_flags=flags_of_roles(["worker"]), file_values=file.own)
    writer = configure_logging(service="ranks", level=settings.log_level, log_format=settings.log_format)
    log_settings(settings)
    return run_service(lambda stop: _run(settings, worker_flags, writer, stop))


class RanksCollector(Collector):
    """Collects a node's metrics."""

    def __init__(self, commands: Sequence[ServiceCommand], num_restarts: Mapping[str, int]) -> None:
        """`num_restarts`, by process, is read at each scrape."""
        self._commands = commands
        self._num_restarts = num_restarts

    def collect(self) -> Iterator[Metric]:
        """See the library's `Collector`."""
        metric = CounterMetricFamily(
            "lockstep_rank_restarts", "Starts of a rank's process after its first, by DP.TP.", labels=["rank"]
        )
        for command in self._commands:
            metric.add_metric([command.rank or ONLY_RANK], self._num_restarts[command.name])
        yield metric


async def _run(settings: RanksSettings, worker_flags: Sequence[str], writer: LineWriter, stop: StopRequest) -> int:
    commands = plan_node(settings, worker_flags)
    try:
        check_packages("ranks", ["worker"])
        settings.check_models([CONFIG])
        own = [Listener("--manage-listen", settings.manage_listen)] if settings.manage_listen else []
        await check_commands(commands, own_listeners=own)
    except RefusedError as error:
        # A signal to all processes has ended those that check the flags, too.
        if not stop.is_set():
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0
    probes = Probes(_NOT_SERVING)
    ranks = _make_processes(settings, commands, writer, probes)
    registry = make_process_registry(RanksCollector(commands, ranks.num_restarts), settings.certificates)
    management = await serve_management(settings.manage_listen, registry, probes)
    try:
        return await _keep_running(settings, ranks, probes, stop)
    finally:
        if management is not None:
            management.close()


def _make_processes(
    settings: RanksSettings, commands: Sequence[ServiceCommand], writer: LineWriter, probes: Probes
) -> CellProcesses:
    def show_state() -> None:
        if ranks.is_serving:
            probes.set_started()
        probes.set_obstacle(None if ranks.is_serving else _NOT_SERVING)

    policy = RestartPolicy(settings.health_kill_s, settings.max_restart_delay_s, settings.max_failed_starts)
    is_text = settings.log_format == "text"
    display = LogDisplay(writer.show if is_text and sys.stderr.isatty() else None)
    ranks = CellProcesses(
        commands,
        policy,
        ProcessesOutput(writer, has_prefixes=is_text, display=display),
        peer=make_peer(settings.certificates, Role.WORKER),
        num_spares=settings.spare_workers,
        on_change=show_state,
    )
    return ranks


async def _keep_running(settings: RanksSettings, ranks: CellProcesses, probes: Probes, stop: StopRequest) -> int:
    """Returns the exit code: 1 if a rank that was asked to stop failed to."""
    running = asyncio.create_task(ranks.run())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if ranks.has_ended_as_asked:
        # What has asked a rank to end may be asking all processes, and this one last.
        await asyncio.wait({stopped}, timeout=SAME_STOP_S)
    stopped.cancel()
    ranks.end()
    await running
    probes.is_leaving = True
    if stop.is_set():
        logger.info("stopping; another signal after 2 s ends the ranks at once", extra={"drain_s": settings.drain_s})
    problems = await ranks.stop(settings.drain_s, stop.is_urgent, was_asked=stop.is_set())
    # The cause comes last, where the reader of the output looks first.
    for problem in reversed(problems):
        print(f"error: {problem}", file=sys.stderr)
    return (ranks.exit_code or 1) if problems else 0
