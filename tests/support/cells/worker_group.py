"""Worker processes of one failure domain, started as by a launcher, without a scheduler."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import ROOT, module_command, module_environment


@dataclass
class WorkerProcess:
    """One process of a group."""

    process: subprocess.Popen[bytes]
    address: str
    log_path: Path

    def wait(self) -> int:
        """Wait for it to end; returns its exit code."""
        return self.process.wait(PATIENCE_S)

    def log(self) -> str:
        """What it has written to stderr so far."""
        return self.log_path.read_text(encoding="utf-8")

    def wait_until_serving(self) -> None:
        """Wait until it reports SERVING.

        Raises:
            RuntimeError: It ended or did not become ready in time; the message includes its log.
        """
        request = health_pb2.HealthCheckRequest()
        try:
            with grpc.insecure_channel(self.address) as channel:
                watch = health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True, timeout=PATIENCE_S)
                if any(response.status == health_pb2.HealthCheckResponse.SERVING for response in watch):
                    return
        except grpc.RpcError as error:
            raise RuntimeError(f"the worker did not become ready:\n{self.log()}") from error


@contextlib.contextmanager
def start_group(model_dir: Path, directory: Path, tp_size: int, *flags: str) -> Iterator[list[WorkerProcess]]:
    """Start a TP group on the exact backend, wait until it is serving, and kill what is left of it at the end.

    Args:
        directory: For sockets and logs.
        tp_size: The number of processes; the first is the leader.
        flags: Further worker flags, for all processes.
    """
    addresses = [f"unix:{directory / f'{rank}.sock'}" for rank in range(tp_size)]
    domain = [f"--tp-size={tp_size}"]
    with contextlib.ExitStack() as stack:
        group = []
        for rank, address in enumerate(addresses):
            place = [f"--listen={address}", f"--tp-rank={rank}", *([f"--leader={addresses[0]}"] if rank else [])]
            group.append(stack.enter_context(_start(model_dir, address, directory, *domain, *place, *flags)))
        for process in group:
            process.wait_until_serving()
        yield group


@contextlib.contextmanager
def _start(model_dir: Path, address: str, directory: Path, *flags: str) -> Iterator[WorkerProcess]:
    log_path = directory / f"{Path(address).stem}.log"
    command = module_command("services.worker", f"--model-dir={model_dir}", "--ops-backend=reference")
    environment = module_environment()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--kv-cache-num-blocks=16", "--num-threads=1", *flags], cwd=ROOT, env=environment, stderr=log
        )
    try:
        yield WorkerProcess(process, address, log_path)
    finally:
        # Works on a stopped process too.
        process.kill()
        process.wait()
