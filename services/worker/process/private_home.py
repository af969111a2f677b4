"""The user's folder, below which libraries keep the kernels that they compile, and run them."""

from __future__ import annotations

import contextlib
from pathlib import Path


def make_home_private() -> None:
    """Make the user's folder with mode 0700, if only it is missing.

    In a pod it lies in a volume that is empty at first and open to all users. Where it cannot be made, what needs it
    says so.
    """
    with contextlib.suppress(OSError, RuntimeError):
        Path.home().mkdir(mode=0o700)
