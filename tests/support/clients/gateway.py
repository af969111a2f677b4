"""Gateways that others have written, in front of a cell's HTTP API: `smg`, and the proxy of LiteLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.system.environments import environment_of
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import program_command

_POLL_S = 0.05


@contextmanager
def start_smg(worker_url: str, folder: Path) -> Iterator[str]:
    """Start `smg`, wait until it has found the model, and end it.

    Args:
        worker_url: The cell's HTTP address.
        folder: The folder for its log.

    Yields:
        Its URL.

    Raises:
        RuntimeError: It ended, or did not find the model within five minutes.
    """
    port = free_port()
    flags = ["--host=127.0.0.1", f"--port={port}", "--worker-urls", worker_url]
    metrics = ["--prometheus-host=127.0.0.1", f"--prometheus-port={free_port()}"]
    program = [_program("smg", "python"), "-m", "smg", "launch", *flags, *metrics]
    with _start(program, os.environ, folder, f"http://127.0.0.1:{port}", "/v1/models") as url:
        yield url


@contextmanager
def start_litellm_proxy(worker_url: str, model: str, key: str, folder: Path) -> Iterator[str]:
    """Start the proxy of LiteLLM with one model by its provider for vLLM, wait until it serves, and end it.

    Args:
        worker_url: The cell's HTTP address.
        model: The model's name, for the proxy's clients and for the cell.
        key: The proxy's key, which its clients send.
        folder: The folder for its configuration and log, and its home.

    Yields:
        Its URL.

    Raises:
        RuntimeError: It ended, or did not serve within five minutes.
    """
    port = free_port()
    parameters = {"model": f"hosted_vllm/{model}", "api_base": f"{worker_url}/v1", "api_key": "none"}
    config = folder / "config.yaml"
    # JSON is YAML.
    config.write_text(json.dumps({"model_list": [{"model_name": model, "litellm_params": parameters}]}), "utf-8")
    own = {"HOME": str(folder), "LITELLM_MASTER_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"}
    program = [_program("litellm_proxy", "litellm"), f"--config={config}", "--host=127.0.0.1", f"--port={port}"]
    with _start(program, os.environ | own, folder, f"http://127.0.0.1:{port}", "/health/liveliness") as url:
        yield url


def _program(client: str, name: str) -> str:
    return str(environment_of(f"clients/{client}") / "bin" / name)


@contextmanager
def _start(
    program: Sequence[str], variables: Mapping[str, str], folder: Path, url: str, ready_path: str
) -> Iterator[str]:
    log_path = folder / "log"
    with log_path.open("w") as log:
        process = subprocess.Popen(program_command(*program), env=variables, stdout=log, stderr=log)
        try:
            _wait_until_ready(process, url + ready_path)
            yield url
        except BaseException:
            # pytest shows it with the failure.
            sys.stderr.write(log_path.read_text(encoding="utf-8"))
            raise
        finally:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(_POLL_S)
    raise RuntimeError("the gateway is not ready")
