"""Programs of other writers, each a process on our interpreter, with our torch and transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.system.environments import TESTS, environment_of

Job = tuple[Path, Any, Any]


def run_jobs(environment: str, script: str, jobs: Sequence[Job], *arguments: str) -> list[str | None]:
    """Run the script of the folder `tests/ENVIRONMENT`; what else it needs is its environment's.

    Args:
        environment: `SUITE/NAME`, see `environment_of`.
        script: It reads the jobs from its input, and writes a line for each: the job's path, and null or what the
            program said.
        jobs: Each with a path of its own.
        arguments: The script's.

    Returns:
        For each job, None if it was done, or else what the program said.
    """
    [packages] = environment_of(environment).glob("lib/python*/site-packages")
    request = [[str(path), source if source is None else str(source), options] for path, source, options in jobs]
    done = subprocess.run(
        [sys.executable, str(TESTS / environment / script), *arguments],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"},
    )
    results = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert len(results) == len(jobs), done.stderr[-4000:]
    return [results[str(path)] for path, _, _ in jobs]
