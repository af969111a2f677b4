"""The protocol between a benchmark and a contestant's process: one line of JSON each way.

Processes take turns, so that other work on the machine affects all of them alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from tests.bench.peers.contestant import calibrate_us

ROOT = Path(__file__).parents[3]


class Scenario(Protocol):
    """A prepared load, of which any number of repeats can be measured."""

    def run(self) -> dict[str, float]:
        """Measure one repeat."""


def serve(scenarios: Mapping[str, Callable[..., Scenario]]) -> None:
    """Answer requests on stdin until it is closed.

    `{"start": name, "arguments": {…}}` builds a scenario, replacing the previous one; `{"run": true}` measures a repeat
    of it, and the machine's speed before and after.
    """
    # Output of libraries, in Python or not, must not mix with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    scenario: Scenario | None = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        if "start" in request:
            # Free the old one before building the new one: both would not fit in memory.
            scenario = None
            scenario = scenarios[request["start"]](**request["arguments"])
        else:
            assert scenario is not None
            before = calibrate_us()
            answer["figures"] = scenario.run()
            answer["calibration_us"] = (before + calibrate_us()) / 2
        print(json.dumps(answer), file=answers, flush=True)


class Process:
    """A contestant's process; created by `start_process`."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: IO[str]) -> None:
        self.name = name
        self._process = process
        self._log = log

    def start(self, scenario: str, **arguments: object) -> None:
        """Build a scenario."""
        self._ask({"start": scenario, "arguments": arguments})

    def run(self) -> tuple[dict[str, float], float]:
        """Measure one repeat; returns its figures and the calibration time in µs."""
        answer = self._ask({"run": True})
        return answer["figures"], answer["calibration_us"]

    def _ask(self, request: dict[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"the process of {self.name} ended with {self._process.wait()}:\n{self._log.read()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def start_process(
    name: str, python: str, module: str, *, root: Path = ROOT, variables: Mapping[str, str] | None = None
) -> Iterator[Process]:
    """Run a contestant's module with an interpreter, in this checkout or another one.

    Args:
        variables: More environment variables.
    """
    env = {**os.environ, "PYTHONPATH": f"{root}:{root / 'protos'}", "HF_HUB_OFFLINE": "1", **(variables or {})}
    command = [python, "-m", module]
    pipe = subprocess.PIPE
    with (
        # The output of libraries is shown only if the process fails.
        tempfile.TemporaryFile("w+", encoding="utf-8") as log,
        subprocess.Popen(command, cwd=root, env=env, stdin=pipe, stdout=pipe, stderr=log, text=True) as process,
    ):
        try:
            yield Process(name, process, log)
        finally:
            process.kill()
