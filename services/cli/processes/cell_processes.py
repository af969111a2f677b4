"""Starts, checks, restarts and stops a cell's processes, as `Supervisor` decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from services.cli.processes.child_process import start_child
from services.cli.processes.display import ProcessesOutput
from services.cli.processes.service_command import ROLES, ServiceCommand
from services.cli.processes.service_process import ServiceProcess
from services.cli.processes.spare_workers import SpareWorkers
from services.cli.processes.supervisor import Kill, RestartPolicy, StartDomain, Supervisor
from shared.network.health import ask_process
from shared.network.heartbeat import next_beat_at
from shared.network.rpc import Peer, make_channel

logger = logging.getLogger(__name__)

# Longer than a service takes to stop cleanly when it has nothing to drain.
STOP_GRACE_S = 10.0

# A serving process is checked less often than a starting one: an idle cell costs next to nothing.
_START_CHECK_PERIOD_S = 0.2
_MAX_CHECK_PERIOD_S = 10.0
_CHECKS_BEFORE_KILL = 3.0

# The one whose end is the end of a drain, and the one that is restarted in it at any time.
_DRAINING_ROLE, _SCHEDULER_ROLE = "tokenizer", "scheduler"


class CellProcesses:
    """Keeps a cell's processes running: `run` until `end` is called or the cell fails, then `stop`.

    `drain`, if it is called, comes before `end`. `has_served` is set once every process has reported that it serves.
    `num_restarts` counts those of each process. `has_cut_answers` says, after `stop`, whether answers in flight were
    ended.
    """

    def __init__(
        self,
        commands: Sequence[ServiceCommand],
        policy: RestartPolicy,
        output: ProcessesOutput,
        *,
        peer: Peer | None = None,
        num_spares: int = 0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; `run` starts them.

        Args:
            commands: In start order.
            peer: The role that answers health checks, as in `make_channel`, other than over unix sockets.
            num_spares: How many spare workers to keep while every process serves.
            on_change: Called when a process has started, exited, or answered otherwise than before.
        """
        self._peer = peer
        self._on_change = on_change
        self.num_restarts = {command.name: 0 for command in commands}
        self.has_served = asyncio.Event()
        self.has_cut_answers = False
        self._domain_to_commands: dict[str, list[ServiceCommand]] = {}
        for command in commands:
            self._domain_to_commands.setdefault(command.domain, []).append(command)
        names = {domain: [command.name for command in some] for domain, some in self._domain_to_commands.items()}
        self._supervisor = Supervisor(names, policy)
        self._spares = SpareWorkers(num_spares, policy.max_delay_s)
        self._check_period_s = min(_MAX_CHECK_PERIOD_S, policy.health_kill_s / _CHECKS_BEFORE_KILL)
        self._prefix_width = max(len(command.name) for command in commands) if output.has_prefixes else 0
        self._writer = output.writer
        self._display = output.display
        self._running: dict[str, ServiceProcess] = {}
        # Processes whose exit ends the cell. The first of them is why.
        self._ended: list[ServiceProcess] = []
        self._drained: list[ServiceProcess] = []
        self._watches: dict[str, asyncio.Task[None]] = {}
        # Set when no answer can be finished any more, or none is to be.
        self._is_drain_over = asyncio.Event()
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
                if self._supervisor.is_serving:
                    # Not earlier: a worker that comes back would have to share the processor with them.
                    await self._spares.refill(self._loop.time())
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

    @property
    def has_ended_as_asked(self) -> bool:
        """Whether the cell failed because something else than the launcher has asked a process to end."""
        return bool(self._ended) and self._ended[0].has_ended_as_asked

    def end(self) -> None:
        """Make `run` return."""
        self._is_over = True
        self._has_news.set()

    async def drain(self, drain_s: float, is_urgent: asyncio.Event) -> None:
        """Stop the tokenizer; while it lets its answers finish, `run` restarts what they need.

        Returns once the tokenizer has ended. Does nothing if it is not running, or if the cell has not served yet.

        Args:
            drain_s: How long the tokenizer lets answers in flight finish.
            is_urgent: Once it is set, the tokenizer ends at once.
        """
        service = next((one for one in self._running.values() if one.command.role == _DRAINING_ROLE), None)
        if service is None or not self._supervisor.has_served or self._is_over:
            return
        command = service.command
        schedulers = {domain for domain, some in self._domain_to_commands.items() if some[0].role == _SCHEDULER_ROLE}
        self._supervisor.begin_drain(command.domain, self._loop.time(), drain_s, schedulers)
        if self._supervisor.has_failed:
            self._end_drain()
        self._watches.pop(command.name).cancel()
        urging = asyncio.create_task(self._end_drain_when(is_urgent))
        await _stop(service, STOP_GRACE_S + drain_s, self._is_drain_over)
        urging.cancel()
        self._drained.append(self._running.pop(command.name))

    async def stop(self, drain_s: float, is_urgent: asyncio.Event, *, was_asked: bool) -> list[str]:
        """Stop every process, in reverse start order, after `run` has returned.

        Args:
            drain_s: How long the tokenizer, if it has not been drained, lets answers in flight finish.
            is_urgent: Once it is set, every process ends at once.
            was_asked: Whether the cell was asked to end, as each of its processes may have been.

        Returns:
            What did not end cleanly, the root cause first, without processes that waited for their restart.
        """
        self._display.end()
        await self._spares.end()
        services = [*self._ended, *self._running.values()]
        own_roles = {some[0].role for some in self._domain_to_commands.values()}
        ends_at_once = is_urgent
        for role in reversed(ROLES):
            some = (service for service in services if service.command.role == role)
            await asyncio.gather(*(_stop(service, STOP_GRACE_S + drain_s, ends_at_once) for service in some))
            if role == _SCHEDULER_ROLE and role in own_roles:
                # No scheduler comes any more, for which a worker that has lost its own would wait.
                ends_at_once = asyncio.Event()
                ends_at_once.set()
        services += self._drained
        unasked = (service for service in services if not (was_asked and service.has_ended_as_asked))
        problems = [service.problem for service in unasked if service.problem is not None]
        self.has_cut_answers = any(service.has_cut_answers for service in services)
        if self.has_cut_answers and not is_urgent.is_set():
            is_hopeless = self._supervisor.is_draining and self._supervisor.has_failed
            too_short = "no worker would have been ready in the time left"
            problems.append(
                f"answers in flight were cut: {too_short if is_hopeless else f'{drain_s:g} s were too short'}"
            )
        return problems

    def _end_drain(self) -> None:
        logger.warning("the drain ends at once: no worker can be ready in time")
        self._is_drain_over.set()

    async def _end_drain_when(self, is_urgent: asyncio.Event) -> None:
        await is_urgent.wait()
        self._is_drain_over.set()

    async def _start(self, domain: str, watchers: _Watchers) -> None:
        commands = self._domain_to_commands[domain]
        for command in commands:
            self.num_restarts[command.name] += command.name in self._started
            self._started.add(command.name)
            spare = await self._spares.take(command)
            process = spare or await start_child(f"services.{command.role}", command.flags)
            service = ServiceProcess(command, process, self._make_write(command))
            self._running[command.name] = service
            logger.info("started", extra=_fields(service) | ({"was_spare": True} if spare else {}))
            self._display.on_start(command.name)
            self._watches[command.name] = watchers.add(self._watch(service, watchers))

    def _make_write(self, command: ServiceCommand) -> Callable[[bytes], None]:
        prefix = f"{command.name:<{self._prefix_width}} | ".encode() if self._prefix_width else b""

        def write(line: bytes) -> None:
            if not self._display.take(command.name, line):
                self._writer.write(prefix + line + b"\n")

        return write

    def _kill(self, name: str, reason: str) -> None:
        logger.warning("killing", extra={**_fields(self._running[name]), "reason": reason})
        self._running[name].kill(reason)

    async def _watch(self, service: ServiceProcess, watchers: _Watchers) -> None:
        checks = watchers.add(self._check_health(service))
        try:
            await service.wait()
        finally:
            checks.cancel()
        name = service.command.name
        del self._running[name], self._watches[name]
        delay_s = self._supervisor.on_exit(name, self._loop.time(), was_asked=service.has_ended_as_asked)
        self._display.on_exit(name, service.problem, delay_s)
        self._on_change()
        if self._supervisor.has_failed:
            self._ended.append(service)
            if self._supervisor.is_draining:
                self._end_drain()
            self.end()
        facts = {**_fields(service), "reason": service.problem}
        if delay_s is not None:
            self._has_news.set()
            facts["delay_s"] = delay_s
            if self._supervisor.is_draining and service.has_ended_as_asked:
                logger.info("ended as asked; restarting if the drain goes on", extra=facts)
            else:
                logger.warning("exited; restarting", extra=facts)
        elif self._supervisor.is_draining:
            logger.warning("exited; the drain is too short for another start", extra=facts)

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
            self._display.on_ready(service.command.name)
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
