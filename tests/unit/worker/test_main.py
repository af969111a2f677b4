from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from services.worker.server.servicer import SERVICE_NAME
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import ROOT, module_command, module_environment
from tests.support.worker.worker_runner import generate_alone, load_exact
from tests.support.worker.worker_steps import (
    decode_step,
    heartbeat_request,
    make_enter,
    prefill_step,
    to_request,
    unpack,
)

pytestmark = pytest.mark.process

# The interpreter takes its own handlers away when it ends, before it clears the modules.
ENDED = """
import os
import signal
import sys

from services.worker.__main__ import main

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

late = Late()
sys.exit(main())
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": 2})


@contextmanager
def running_worker(model_dir: Path, address: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [
            *module_command("services.worker", f"--model-dir={model_dir}", f"--listen={address}"),
            *("--ops-backend=reference", "--kv-cache-num-blocks=16", *flags),
        ],
        cwd=ROOT,
        env=module_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_server(channel: grpc.Channel) -> Iterator[int]:
    """Wait for the worker's first answer; returns its health."""
    request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
    for response in health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True, timeout=PATIENCE_S):
        yield response.status


def test_a_worker_process_loads_serves_steps_and_stops_at_a_signal(model_dir: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'worker.sock'}"
    with running_worker(model_dir, address) as process, grpc.insecure_channel(address) as channel:
        assert health_pb2.HealthCheckResponse.SERVING in wait_for_server(channel)
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        attached = stub.Attach(
            worker_pb2.AttachRequest(
                epoch=1, scheduler_instance_id="test", block_size=4, max_num_seqs=2, max_num_batched_tokens=64
            )
        )
        assert (attached.num_blocks, attached.ops_backend) == (16, "reference")
        steps = [prefill_step(make_enter(0, [5, 9, 2], [3, 4])), decode_step(step_id=2)]
        results = stub.Execute(iter([heartbeat_request(), *(to_request(step) for step in steps)]))
        tokens = [unpack(result.token_ids)[0] for result in results if not result.HasField("heartbeat")]
        assert tokens == generate_alone(load_exact(model_dir), [5, 9, 2], 2)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, log
    assert "loading weights percent=100" in log
    assert not (tmp_path / "worker.sock").exists()


def test_ctrl_c_stops_a_worker_from_its_first_answer_on(model_dir: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'worker.sock'}"
    with running_worker(model_dir, address) as process, grpc.insecure_channel(address) as channel:
        next(wait_for_server(channel))
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, log


def test_a_configuration_alone_is_served_with_dummy_weights(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    address = f"unix:{tmp_path / 'worker.sock'}"
    flags = ("--load-format=dummy", "--dummy-seed=7")
    with running_worker(tmp_path, address, *flags), grpc.insecure_channel(address) as channel:
        assert health_pb2.HealthCheckResponse.SERVING in wait_for_server(channel)


def test_a_directory_without_a_model_ends_the_process_with_one_clear_line(tmp_path: Path) -> None:
    with running_worker(tmp_path, f"unix:{tmp_path / 'worker.sock'}") as process:
        _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    errors = [line for line in log.splitlines() if "ERROR" in line]
    assert len(errors) == 1
    assert "config.json" in errors[0]
    assert "Traceback" not in log


def test_a_taken_management_address_is_named_and_prevents_the_start(model_dir: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with running_worker(model_dir, f"unix:{tmp_path / 'worker.sock'}", f"--manage-listen={address}") as process:
            _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert log.splitlines()[-1].endswith(f"cannot serve error=--manage-listen: {address}: Address already in use")
    assert "Traceback" not in log


def test_a_taken_address_is_refused_and_its_owner_is_left_alone(model_dir: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'worker.sock'}"
    with running_worker(model_dir, address), grpc.insecure_channel(address) as channel:
        next(wait_for_server(channel))
        with running_worker(model_dir, address) as second:
            _, log = second.communicate(timeout=PATIENCE_S)
        assert second.returncode == 1
        assert "already in use" in log
        assert health_pb2.HealthCheckResponse.SERVING in wait_for_server(channel)


def test_a_signal_while_the_interpreter_ends_does_not_replace_the_exit_code(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDED, f"--model-dir={tmp_path}", f"--listen=unix:{tmp_path}/socket"]
    run = subprocess.run(
        command, cwd=ROOT, env=module_environment(), stderr=subprocess.PIPE, timeout=PATIENCE_S, check=False
    )
    assert b"cannot load the model" in run.stderr
    assert run.returncode == 1
