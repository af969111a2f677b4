"""A module of this checkout as a child process that dies with the launcher, however that ends (on Linux).

A child lives in a session of its own, so that Ctrl-C reaches the launcher alone.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from shared.parent import make_end_with_parent

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
        preexec_fn=make_end_with_parent(os.getpid()),
    )
