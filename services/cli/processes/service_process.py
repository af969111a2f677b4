"""One service of a cell as a child process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable

from services.cli.processes.core_log import CoreLog
from services.cli.processes.last_problem import LastProblem
from services.cli.processes.service_command import ServiceCommand
from shared.process.lifecycle import ANSWERS_CUT

_MAX_LINE_BYTES = 1 << 16
_OUTPUT_GRACE_S = 1.0
# A process that was asked a moment ago takes the next signal for the same request.
_URGE_PERIOD_S = 0.5


class ServiceProcess:
    """A service's process; its output is forwarded line by line, but for what gRPC's core writes: see `CoreLog`."""

    def __init__(
        self, command: ServiceCommand, process: asyncio.subprocess.Process, write: Callable[[bytes], None]
    ) -> None:
        """Take a process over, as `start_child` returns it.

        `write` receives each line of its output that is not of gRPC's core, without the newline.
        """
        self.command = command
        self._process = process
        self._last_problem = LastProblem()
        self._core_log = CoreLog(command.name)
        self._output = asyncio.create_task(self._copy_output(write))
        self._problem: str | None = None
        self._kill_reason: str | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """As a shell shows it, 128 and the signal's number if one ended the process; None while it runs."""
        code = self._process.returncode
        return 128 - code if code is not None and code < 0 else code

    @property
    def has_ended_as_asked(self) -> bool:
        """Whether the process ended as it does when it is asked to, by the launcher or by whatever asks them all."""
        # A service that is just starting has no handler for SIGTERM yet.
        codes = (0, ANSWERS_CUT, -signal.SIGTERM)
        return self._process.returncode in codes and self._kill_reason is None

    @property
    def has_cut_answers(self) -> bool:
        """Whether it ended answers because it was asked to end, and they did not finish in time."""
        return self._process.returncode == ANSWERS_CUT

    @property
    def problem(self) -> str | None:
        """How and, if known, why the process ended; None while it runs and after a clean end."""
        has_failed = (self._process.returncode or 0) > 0 and self._kill_reason is None
        if self._problem is None or self._last_problem.text is None or not has_failed:
            return self._problem
        return f"{self._problem}: {self._last_problem.text}"

    async def wait(self) -> None:
        """Return once the process has ended by itself."""
        self._problem = self._describe(await self._process.wait())

    def kill(self, reason: str) -> None:
        """Kill the process and all it started; `problem` will have the reason."""
        self._kill_reason = reason
        self._kill_group()

    async def stop(self, grace_s: float, is_urgent: asyncio.Event) -> None:
        """End the process if it still runs, killing it after `grace_s`; sets `problem` if the end was not clean.

        Once `is_urgent` is set, it is asked again and again, which ends it at once.
        """
        if self._process.returncode is None:
            self._process.terminate()
            urging = asyncio.create_task(self._terminate_when(is_urgent))
            await self._wait_or_kill(grace_s)
            urging.cancel()
        elif self._problem is None and not self.has_ended_as_asked:
            self._problem = self._describe(self._process.returncode)
        # Let its last output appear before the launcher's. A grandchild may keep the pipe open, hence the timeout.
        await asyncio.wait([self._output], timeout=_OUTPUT_GRACE_S)

    async def _terminate_when(self, is_urgent: asyncio.Event) -> None:
        await is_urgent.wait()
        while True:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await asyncio.sleep(_URGE_PERIOD_S)

    async def _wait_or_kill(self, grace_s: float) -> None:
        try:
            async with asyncio.timeout(grace_s):
                returncode = await self._process.wait()
        except TimeoutError:
            self._kill_group()
            await self._process.wait()
            self._problem = f"the {self.command.name} did not stop within {grace_s:g} s and was killed"
            return
        if not self.has_ended_as_asked:
            self._problem = f"{self._describe(returncode)} when asked to stop"

    def _kill_group(self) -> None:
        # It may have ended without our having been notified yet.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _copy_output(self, write: Callable[[bytes], None]) -> None:
        """Forward whole lines, so that those of different services do not mix."""
        assert self._process.stdout is not None
        async for line in _read_lines(self._process.stdout):
            self._last_problem.add(line)
            if not self._core_log.try_add(line):
                write(line)

    def _describe(self, returncode: int) -> str:
        if self._kill_reason is not None:
            return f"the {self.command.name} was killed: {self._kill_reason}"
        return f"the {self.command.name} {_describe_exit(returncode)}"


async def _read_lines(source: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """An overlong line is split."""
    rest = b""
    while chunk := await source.read(_MAX_LINE_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            yield line
    if rest:
        yield rest


def _describe_exit(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"
