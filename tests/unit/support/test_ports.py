"""Each port belongs to one test process, even before a server listens on it."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.system.ports import free_port
from tests.support.system.processes import module_environment, python_command

pytestmark = pytest.mark.process

TAKE_ONE = "from tests.support.system.ports import free_port; print(free_port())"


def test_two_test_runs_with_the_same_worker_number_get_different_ports() -> None:
    # The other process starts its search at the same port.
    own = free_port()
    command = python_command("-c", TAKE_ONE)
    other = subprocess.run(command, env=module_environment(), capture_output=True, text=True, timeout=300, check=True)
    assert int(other.stdout) != own
