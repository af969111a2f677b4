"""One service of a cell as a child process: started, watched, shown on the terminal, stopped.

A child lives in a session of its own, so that Ctrl-C reaches the launcher alone, and dies with the launcher
however that ends (on Linux).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import BinaryIO

from shared.cli.cell_plan import ServiceCommand

_PR_SET_PDEATHSIG = 1
_MAX_LINE_BYTES = 1 << 20
_OUTPUT_GRACE_S = 1.0

# gRPC's core would tell on stderr of every connection that ends.
_DEFAULT_ENVIRONMENT = {"GRPC_VERBOSITY": "ERROR"}


class ServiceProcess:
    """A service's process. What it writes comes out of the launcher's stderr, each line behind its name."""

    def __init__(
        self, command: ServiceCommand, process: asyncio.subprocess.Process, output: asyncio.Task[None]
    ) -> None:
        self.command = command
        self.problem: str | None = None
        self._process = process
        self._output = output
        self._kill_reason: str | None = None

    @classmethod
    async def start(cls, command: ServiceCommand, start_flags: Sequence[str], *, line_prefix: str) -> ServiceProcess:
        """Start `python -m services.ROLE`. Call it from the main thread: the child dies when its starter does."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"services.{command.role}",
            *command.flags,
            *start_flags,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**_DEFAULT_ENVIRONMENT, **os.environ},
            start_new_session=True,
            preexec_fn=_die_with_parent(),
        )
        assert process.stdout is not None
        output = asyncio.create_task(_copy_lines(process.stdout, sys.stderr.buffer, line_prefix.encode()))
        return cls(command, process, output)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    async def wait(self) -> None:
        """Return when the process has ended by itself; `problem` then says how."""
        self.problem = self._describe(await self._process.wait())

    def kill(self, reason: str) -> None:
        """End the process and what it started by force; `wait` returns then, and `problem` tells the reason."""
        self._kill_reason = reason
        os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, grace_s: float) -> None:
        """End the process, by force after `grace_s`; `problem` is set when that was not clean.

        It may have ended already.
        """
        if self._process.returncode is None:
            self._process.terminate()
            await self._wait_or_kill(grace_s)
        elif self.problem is None:
            self.problem = self._describe(self._process.returncode)
        # Its last words come out before the launcher's. A grandchild may hold the pipe open.
        await asyncio.wait([self._output], timeout=_OUTPUT_GRACE_S)

    async def _wait_or_kill(self, grace_s: float) -> None:
        try:
            async with asyncio.timeout(grace_s):
                returncode = await self._process.wait()
        except TimeoutError:
            os.killpg(self.pid, signal.SIGKILL)
            await self._process.wait()
            self.problem = f"the {self.command.name} did not stop within {grace_s:g} s and was killed"
            return
        # A service that is only just starting has no handler for the signal yet.
        if returncode not in (0, -signal.SIGTERM):
            self.problem = f"{self._describe(returncode)} when asked to stop"

    def _describe(self, returncode: int) -> str:
        if self._kill_reason is not None:
            return f"the {self.command.name} was killed: {self._kill_reason}"
        return f"the {self.command.name} {_describe_exit(returncode)}"


async def _copy_lines(source: asyncio.StreamReader, sink: BinaryIO, prefix: bytes) -> None:
    """Copy whole lines until the end, so that those of several services do not mix."""
    rest = b""
    while chunk := await source.read(_MAX_LINE_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        sink.write(b"".join(prefix + line + b"\n" for line in lines))
        sink.flush()
    if rest:
        sink.write(prefix + rest + b"\n")
        sink.flush()


def _describe_exit(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def _die_with_parent() -> Callable[[], None] | None:
    """What the child runs before its program, so that the kernel kills it when this process ends."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def ask_the_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have ended before the kernel was asked.
        if os.getppid() != parent:
            os._exit(1)

    return ask_the_kernel
