"""`smg`, a gateway that others have written, in front of a cell's HTTP API."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.system.environments import environment_of
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import program_command

_POLL_S = 0.05


@contextmanager
def start_gateway(worker_url: str, log_path: Path) -> Iterator[str]:
    """Start the gateway, wait until it has found the model, and end it.

    Args:
        worker_url: The cell's HTTP address.
        log_path: The file for its log.

    Yields:
        Its URL.

    Raises:
        RuntimeError: It ended, or did not find the model within five minutes.
    """
    port = free_port()
    flags = ["--host=127.0.0.1", f"--port={port}", "--worker-urls", worker_url]
    metrics = ["--prometheus-host=127.0.0.1", f"--prometheus-port={free_port()}"]
    program = [str(environment_of("clients/smg") / "bin" / "python"), "-m", "smg", "launch", *flags, *metrics]
    url = f"http://127.0.0.1:{port}"
    with log_path.open("w") as log, subprocess.Popen(program_command(*program), stdout=log, stderr=log) as process:
        try:
            _wait_until_ready(process, url)
            yield url
        except BaseException:
            # pytest shows it with the failure.
            sys.stderr.write(log_path.read_text(encoding="utf-8"))
            raise
        finally:
            process.kill()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/v1/models"):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(_POLL_S)
    raise RuntimeError("the gateway did not find the model")
