"""A module of this checkout as a child process that dies with the launcher, however that ends (on Linux).

A child lives in a session of its own, so that Ctrl-C reaches the launcher alone.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence

_PR_SET_PDEATHSIG = 1

# gRPC's core would tell on stderr of every connection that ends.
_DEFAULT_ENVIRONMENT = {"GRPC_VERBOSITY": "ERROR"}


async def start_child(module: str, flags: Sequence[str]) -> asyncio.subprocess.Process:
    """Start `python -m MODULE`; its stdout is a pipe that takes its stderr as well.

    Call it from the main thread: the child dies when its starter does.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *flags,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**_DEFAULT_ENVIRONMENT, **os.environ},
        start_new_session=True,
        preexec_fn=_die_with_parent(),
    )


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
