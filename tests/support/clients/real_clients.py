"""Clients of the HTTP API that others have written: finds their checks, and runs them in the client's environment.

A check is a function `check_...` in a file `*checks.py` or `*checks.mjs` of the client's folder. Its arguments name
fixtures, whose values are JSON: the cell to talk to, and whatever else it needs. It raises if something is wrong.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.system.environments import NODE_PROGRAMS, TESTS, environment_of
from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import program_command

# So that none asks another host for prices, models or data, or tells one what it does.
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "*",
    "DO_NOT_TRACK": "1",
}

CLIENTS = TESTS / "clients"
_CHECK = re.compile(r"^(?:export )?(?:async )?(?:def|function) (check_\w+)\(([^)]*)\)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a client.

    Attributes:
        client: The client's name, which is that of its folder.
        file: The name of its file, without the suffix.
        name: The function's name.
        fixtures: The names of its arguments.
    """

    client: str
    file: str
    name: str
    fixtures: tuple[str, ...]

    def __str__(self) -> str:
        parts = (self.client, self.file.removesuffix("checks").rstrip("_"), self.name.removeprefix("check_"))
        return "-".join(part for part in parts if part)


def find_checks() -> list[Check]:
    """All checks of all clients."""
    checks = []
    for path in sorted(CLIENTS.glob("*/*checks.*")):
        for name, arguments in _CHECK.findall(path.read_text(encoding="utf-8")):
            names = (argument.partition(":")[0].strip() for argument in arguments.split(","))
            checks.append(Check(path.parent.name, path.stem, name, tuple(name for name in names if name)))
    return checks


class ClientProcess:
    """A process that runs the checks of one client, one at a time. `start_client` makes one and ends it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @property
    def is_running(self) -> bool:
        """Whether it can run a check."""
        return self._process.poll() is None

    def run(self, check: Check, arguments: Sequence[Any]) -> None:
        """Run a check.

        Raises:
            AssertionError: It failed, did not end, or ended the process; the message says how.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"file": check.file, "check": check.name, "arguments": list(arguments)}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], PATIENCE_S)[0]:
            self._process.kill()
            raise AssertionError(f"{check} does not end")
        line = self._process.stdout.readline()
        assert line, f"{check} ended the client's process"
        answer = json.loads(line)
        assert answer["check"] == check.name
        if not answer["ok"]:
            raise AssertionError(f"{check}\n{answer['error']}")


@contextmanager
def start_client(name: str, home: Path) -> Iterator[ClientProcess]:
    """Start a client's process, which logs to the stderr of the test.

    Args:
        name: The client's name.
        home: An empty folder, the client's home.
    """
    process = subprocess.Popen(
        _command(name),
        env=_variables(home),
        cwd=home,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield ClientProcess(process)
    finally:
        process.kill()
        process.communicate()


def _command(name: str) -> list[str]:
    environment = environment_of(f"clients/{name}")
    python = environment / "bin" / "python"
    if python.exists():
        return program_command(str(python), str(CLIENTS / "run_checks.py"), name)
    return program_command(str(NODE_PROGRAMS / "node"), str(CLIENTS / "run_checks.mjs"), name, str(environment))


def _variables(home: Path) -> Mapping[str, str]:
    """None of the developer's own, which may have keys, proxies and settings of the client."""
    paths = [str(NODE_PROGRAMS), os.environ["PATH"]]
    own = {"HOME": str(home), "TMPDIR": str(home), "PATH": os.pathsep.join(paths), "LANG": "C.UTF-8"}
    return own | _OFFLINE
