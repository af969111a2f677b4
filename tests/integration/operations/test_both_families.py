"""A service on `[::]` is reached by IPv6 and by IPv4, on each of its ports."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.models.tiny_tokenizer import write_tiny_tokenizer
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import ROOT, module_environment, python_command

HOSTS = ("[::1]", "127.0.0.1")


@contextmanager
def tokenizer(*flags: str) -> Iterator[None]:
    """A tokenizer, killed at the end."""
    command = python_command("-m", "services.tokenizer", *flags)
    with subprocess.Popen(command, cwd=ROOT, env=module_environment()) as process:
        try:
            yield
        finally:
            process.kill()


@pytest.mark.process
def test_every_port_on_any_address_of_ipv6_serves_both_families(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    grpc_port, http_port, manage_port = free_port(), free_port(), free_port()
    flags = [
        f"--model-dir={tmp_path}",
        f"--scheduler=127.0.0.1:{free_port()}",
        f"--insecure-bind=[::]:{grpc_port}",
        f"--insecure-http-bind=[::]:{http_port}",
        f"--manage-listen=[::]:{manage_port}",
    ]
    with tokenizer(*flags):
        for host in HOSTS:
            # The first call waits until the service listens.
            with grpc.insecure_channel(f"{host}:{grpc_port}") as channel:
                check = health_pb2_grpc.HealthStub(channel).Check
                check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=PATIENCE_S)
            assert status(host, manage_port, "/livez") == 200
            assert status(host, http_port, "/version") == 200


def status(host: str, port: int, path: str) -> int:
    """What a GET is answered with."""
    connection = HTTPConnection(host.strip("[]"), port, timeout=PATIENCE_S)
    with closing(connection):
        # A service on any address serves any host.
        connection.request("GET", path)
        return connection.getresponse().status
