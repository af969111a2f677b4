"""Runs a module as a child process that dies with the launcher (on Linux).

Each child has its own session, so that Ctrl-C reaches only the launcher.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from shared.process.parent import make_end_with_parent


async def start_child(
    module: str, flags: Sequence[str], *, stdin: int = asyncio.subprocess.DEVNULL
) -> asyncio.subprocess.Process:
    """Start `python -m MODULE` with stdout and stderr in one pipe.

    Only from the main thread: the child dies with the thread that started it.

    Args:
        stdin: A file descriptor of the caller's; by default it is empty.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *flags,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=make_end_with_parent(os.getpid()),
    )
