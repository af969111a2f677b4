"""Starts, checks, restarts and stops a cell's processes, as `Supervisor` decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from shared.cli.processes.loading_bar import LoadingBar
from shared.cli.processes.service_command import ROLES, ServiceCommand
from shared.cli.processes.service_process import ServiceProcess
from shared.cli.processes.supervisor import Kill, RestartPolicy, StartDomain, Supervisor
from shared.network.health import ask_process
from shared.network.heartbeat import next_beat_at
from shared.network.rpc import Peer, make_channel
from shared.process.line_writer import LineWriter

logger = logging.getLogger(__name__)

# Longer than a service takes to stop cleanly when it has nothing to drain.
STOP_GRACE_S = 10.0

# A serving process is checked less often than a starting one: an idle cell costs next to nothing.
_START_CHECK_PERIOD_S = 0.2
_MAX_CHECK_PERIOD_S = 10.0
_CHECKS_BEFORE_KILL = 3.0


class CellProcesses:
    """Keeps a cell's processes running: `run` until `end` is called or the cell fails, then `stop`.

    `has_served` is set once every process has reported that it serves. `num_restarts` counts those of each process.
    """

    def __init__(
        self,
        commands: Sequence[ServiceCommand],
        policy: RestartPolicy,
        writer: LineWriter,
        *,
        has_prefixes: bool,
        peer: Peer | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; `run` starts them.

        Args:
            commands: In start order.
            has_prefixes: Whether the process's name comes before each line of output.
            peer: The role that answers health checks, as in `make_channel`, other than over unix sockets.
            on_change: Called when a process has started, exited, or answered otherwise than before.
        """
        self._peer = peer
        self._on_change = on_change
        self.num_restarts = {command.name: 0 for command in commands}
        self.has_served = asyncio.Event()
        self._domain_to_commands: dict[str, list[ServiceCommand]] = {}
        for command in commands:
            self._domain_to_commands.setdefault(command.domain, []).append(command)
        names = {domain: [command.name for command in some] for domain, some in self._domain_to_commands.items()}
        self._supervisor = Supervisor(names, policy)
        self._check_period_s = min(_MAX_CHECK_PERIOD_S, policy.health_kill_s / _CHECKS_BEFORE_KILL)
        self._prefix_width = max(len(command.name) for command in commands) if has_prefixes else 0
        self._writer = writer
        self._bar = LoadingBar(writer.show) if has_prefixes and sys.stderr.isatty() else None
        self._running: dict[str, ServiceProcess] = {}
        # Processes whose exit ends the cell. The first of them is why.
        self._ended: list[ServiceProcess] = []
        self._started: set[str] = set()
        self._is_over = False
        # Set when the supervisor has been notified of an exit, or when `run` is to return.
        self._has_news = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Start every process, and restart those that exit."""
        async with asyncio.TaskGroup() as group:
            watchers = _Watchers(group)
            while not self._is_over:
                for action in self._supervisor.on_time(self._loop.time()):
                    match action:
                        case StartDomain(domain):
                            await self._start(domain, watchers)
                        case Kill(name, reason):
                            self._kill(name, reason)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._supervisor.next_time(self._loop.time())):
                        await self._has_news.wait()
                self._has_news.clear()
            watchers.cancel()

    @property
    def is_serving(self) -> bool:
        """Whether every process runs, and said last that it serves."""
        return self._supervisor.is_serving

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process because of which the cell failed; None if it has not failed."""
        return self._ended[0].exit_code if self._ended else None

    def end(self) -> None:
        """Make `run` return."""
        self._is_over = True
        self._has_news.set()

    async def stop(self, drain_s: float, is_urgent: asyncio.Event) -> list[str]:
        """Stop every process, in reverse start order, after `run` has returned.

        Args:
            drain_s: How long the tokenizer lets answers in flight finish.
            is_urgent: Once it is set, every process ends at once.

        Returns:
            What did not end cleanly, the root cause first, without processes that waited for their restart.
        """
        if self._bar is not None:
            # Processes still loading are never dropped from the bar, which must not cover the final messages.
            self._bar.end()
        services = [*self._ended, *self._running.values()]
        for role in reversed(ROLES):
            some = (service for service in services if service.command.role == role)
            await asyncio.gather(*(_stop(service, STOP_GRACE_S + drain_s, is_urgent) for service in some))
        return [service.problem for service in services if service.problem is not None]

    async def _start(self, domain: str, watchers: _Watchers) -> None:
        commands = self._domain_to_commands[domain]
        for command in commands:
            self.num_restarts[command.name] += command.name in self._started
            self._started.add(command.name)
            service = await ServiceProcess.start(command, self._make_write(command))
            self._running[command.name] = service
            logger.info("started", extra=_fields(service))
            watchers.add(self._watch(service, watchers))

    def _make_write(self, command: ServiceCommand) -> Callable[[bytes], None]:
        prefix = f"{command.name:<{self._prefix_width}} | ".encode() if self._prefix_width else b""

        def write(line: bytes) -> None:
            if self._bar is None or not self._bar.take(command.name, line):
                self._writer.write(prefix + line + b"\n")

        return write

    def _kill(self, name: str, reason: str) -> None:
        logger.warning("killing", extra={**_fields(self._running[name]), "reason": reason})
        self._running[name].kill(reason)

    async def _watch(self, service: ServiceProcess, watchers: _Watchers) -> None:
        checks = watchers.add(self._check_health(service))
        await service.wait()
        checks.cancel()
        name = service.command.name
        del self._running[name]
        if self._bar is not None:
            self._bar.drop(name)
        delay_s = self._supervisor.on_exit(name, self._loop.time())
        self._on_change()
        if delay_s is None:
            self._ended.append(service)
            self.end()
        else:
            self._has_news.set()
            restart = {"reason": service.problem, "delay_s": delay_s}
            logger.warning("exited; restarting", extra={**_fields(service), **restart})

    async def _check_health(self, service: ServiceProcess) -> None:
        while True:
            # A new channel after a check without an answer: it has the certificates of the day.
            async with make_channel(service.command.health_address, internal=True, peer=self._peer) as channel:
                is_serving: bool | None = False
                while is_serving is not None:
                    is_serving = await ask_process(channel, service.pid, self._check_period_s)
                    if is_serving is not None:
                        self._on_answer(service, is_serving=is_serving)
                    now = self._loop.time()
                    period_s = self._check_period_s if is_serving else _START_CHECK_PERIOD_S
                    await asyncio.sleep(next_beat_at(now, period_s) - now)

    def _on_answer(self, service: ServiceProcess, *, is_serving: bool) -> None:
        if self._supervisor.on_answer(service.command.name, self._loop.time(), is_serving=is_serving):
            logger.info("ready", extra=_fields(service))
        if self._supervisor.has_served:
            self.has_served.set()
        self._on_change()


class _Watchers:
    """Tasks of a group that `cancel` ends."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


async def _stop(service: ServiceProcess, grace_s: float, is_urgent: asyncio.Event) -> None:
    await service.stop(grace_s, is_urgent)
    logger.info("stopped", extra=_fields(service))


def _fields(service: ServiceProcess) -> dict[str, object]:
    rank = {"rank": service.command.rank} if service.command.rank else {}
    return {"role": service.command.role, **rank, "pid": service.pid}
