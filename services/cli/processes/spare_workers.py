"""Spare workers: processes that have imported what a worker imports, and become the next one that is started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from dataclasses import dataclass

from services.cli.processes.child_process import start_child
from services.cli.processes.last_problem import LastProblem
from services.cli.processes.service_command import ServiceCommand
from services.cli.processes.supervisor import FIRST_DELAY_S
from shared.backoff import Backoff
from shared.process.handover import TAKES, encode_flags

logger = logging.getLogger(__name__)

_ROLE = "worker"
# One that has lived for this long did not end because of how it was started.
_PROVEN_S = 60.0
_OUTPUT_GRACE_S = 1.0
# One that waits answers within milliseconds, unless it is stopped or the machine is very busy.
_ANSWER_S = 5.0


@dataclass(slots=True)
class _Spare:
    process: asyncio.subprocess.Process
    link: socket.socket
    started_at: float
    waits: bool = False
    """Whether it has said that its imports are done."""


class SpareWorkers:
    """Keeps a number of spare workers, once `refill` is called from time to time.

    One that ends is replaced, after a delay that doubles while they end soon. Nothing else depends on them: where there
    is none, a worker is started as ever.
    """

    def __init__(self, number: int, max_delay_s: float, *, module: str = "services.worker.spare") -> None:
        """No process is started yet.

        Args:
            number: How many to keep; none if 0.
            max_delay_s: The longest delay before one that ended is replaced.
            module: What they run; see `shared.process.handover`.
        """
        self._number = number
        self._module = module
        # Nothing random: a launcher waits for nothing that others wait for too.
        self._backoff = Backoff(FIRST_DELAY_S, max_delay_s, jitter=0.0)
        self._start_at = 0.0
        self._spares: list[_Spare] = []

    async def refill(self, now: float) -> None:
        """Start those that are missing, if their delay is over. Only from the main thread, with which they die."""
        for spare in list(self._spares):
            if spare.process.returncode is not None:
                await self._on_death(spare, now)
            elif not spare.waits and _says_it_waits(spare.link):
                spare.waits = True
                logger.info("a spare worker waits", extra={"pid": spare.process.pid})
        while len(self._spares) < self._number and now >= self._start_at:
            try:
                self._spares.append(await _start(self._module, now))
            except OSError as error:
                fields = {"reason": str(error), "delay_s": self._delay(now)}
                logger.warning("a spare worker cannot be started", extra=fields)

    async def take(self, command: ServiceCommand) -> asyncio.subprocess.Process | None:
        """Let a spare become the process of a command, output unread; None if there is no spare for it.

        One that is still importing is taken too: a process that was started beside it would be later.
        """
        while command.role == _ROLE and self._spares:
            spare = self._spares.pop(0)
            with spare.link:
                if await _hand_over(spare, command):
                    self._backoff.reset()
                    return spare.process
            await _end(spare)
        return None

    async def end(self) -> None:
        """End them all."""
        spares, self._spares, self._number = self._spares, [], 0
        for spare in spares:
            spare.link.close()
            await _end(spare)

    async def _on_death(self, spare: _Spare, now: float) -> None:
        self._spares.remove(spare)
        spare.link.close()
        if now - spare.started_at >= _PROVEN_S:
            self._backoff.reset()
        delay_s = self._delay(now)
        problem = await _last_problem(spare.process)
        code = spare.process.returncode
        # What asks all processes to end asks a spare too, perhaps before its launcher.
        level = logging.INFO if code in (0, -signal.SIGTERM) else logging.WARNING
        fields = {"pid": spare.process.pid, "exit_code": code, "reason": problem, "delay_s": delay_s}
        logger.log(level, "a spare worker exited; restarting", extra=fields)

    def _delay(self, now: float) -> float:
        """Start none for the next delay, in seconds, which is returned."""
        delay_s = self._backoff.next_delay_s()
        self._start_at = now + delay_s
        return delay_s


async def _start(module: str, now: float) -> _Spare:
    own, other = socket.socketpair()
    own.setblocking(False)
    with other:
        try:
            return _Spare(await start_child(module, (), stdin=other.fileno()), own, now)
        except OSError:
            own.close()
            raise


def _says_it_waits(link: socket.socket) -> bool:
    try:
        return bool(link.recv(1))
    except OSError:
        return False


async def _hand_over(spare: _Spare, command: ServiceCommand) -> bool:
    """Whether the spare has the command's flags, and goes on."""
    text, waits = encode_flags(command.flags), spare.waits or _says_it_waits(spare.link)
    try:
        if spare.process.returncode is not None or spare.link.send(text) != len(text):
            return False
        if not waits:
            return True
        async with asyncio.timeout(_ANSWER_S):
            return await asyncio.get_running_loop().sock_recv(spare.link, 1) == TAKES
    except OSError:
        # It is gone, does not answer (`TimeoutError`), or the socket does not hold the flags.
        return False


async def _end(spare: _Spare) -> None:
    # It may have ended without our having been notified yet.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(spare.process.pid, signal.SIGKILL)
    await spare.process.wait()


async def _last_problem(process: asyncio.subprocess.Process) -> str | None:
    """Why it ended, by its own output."""
    assert process.stdout is not None
    problem = LastProblem()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_OUTPUT_GRACE_S):
            for line in (await process.stdout.read()).splitlines():
                problem.add(line)
    return problem.text
