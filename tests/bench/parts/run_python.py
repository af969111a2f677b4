"""A Python process that is run to its end, and what it took."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.system.processes import module_environment


def run_python(args: Sequence[str], root: Path) -> tuple[float, float]:
    """Run Python with the modules of the checkout `root`; returns its wall time and its processor time, in seconds."""
    begun_at = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *args], env=module_environment(root), cwd=root, stdout=subprocess.DEVNULL
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"error: python {args} of {root} ended with {process.returncode}")
    return time.monotonic() - begun_at, usage.ru_utime + usage.ru_stime
