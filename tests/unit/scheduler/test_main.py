"""The service as a process of its own: what it refuses at start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}


def run_service(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run the service to its end."""
    command = [sys.executable, "-m", "services.scheduler", *flags]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("flag", ["--listen", "--metrics-listen"])
def test_a_taken_address_is_named_and_refuses_the_start(flag: str, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        result = run_service(f"--listen=unix:{tmp_path}/scheduler", f"{flag}={address}")
    assert result.returncode == 1
    assert address in result.stderr
    assert flag != "--metrics-listen" or "--metrics-listen" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("address", ["nowhere", "0.0.0.0:9100"])
def test_a_metrics_address_that_is_none_or_open_to_others_is_named(address: str) -> None:
    result = run_service(f"--metrics-listen={address}")
    assert result.returncode == 2
    assert "error: --metrics-listen (or LOCKSTEP_SCHEDULER_METRICS_LISTEN): " in result.stderr
