from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from services.worker.config import WorkerSettings
from services.worker.models.loader import LoadedModel
from services.worker.process.device_loop import DeviceLoop
from services.worker.process.exits import DomainEnd
from services.worker.process.rpc_thread import RpcThread
from services.worker.server.leader import Leader
from services.worker.server.servicer import SERVICE_NAME
from shared.config import load_settings
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.system.scraping import probes
from tests.support.worker.worker_runner import load_exact, make_runner


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_exact(write_tiny_llama(tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": 2}))


def make_rpc_thread(address: str, *flags: str, manage_listen: str | None = None) -> RpcThread:
    """The RPC thread of a leader; its model is never loaded from the directory."""
    settings = load_settings(WorkerSettings, ["--model-dir=/m", f"--listen={address}", *flags])
    device = DeviceLoop()
    end = DomainEnd(device)
    return RpcThread(address, Leader(settings, device, end), end, reflection=False, manage_listen=manage_listen)


def wait_until_serving(channel: grpc.Channel) -> None:
    request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
    for response in health_pb2_grpc.HealthStub(channel).Watch(request):
        if response.status == health_pb2.HealthCheckResponse.SERVING:
            return


def health_of(channel: grpc.Channel) -> list[str]:
    stub = health_pb2_grpc.HealthStub(channel)
    return [
        health_pb2.HealthCheckResponse.ServingStatus.Name(
            stub.Check(health_pb2.HealthCheckRequest(service=name), wait_for_ready=True).status
        )
        for name in ("", SERVICE_NAME)
    ]


def test_a_worker_answers_while_it_loads_and_serves_once_it_has_a_model(tmp_path: Path, loaded: LoadedModel) -> None:
    address = f"unix:{tmp_path / 'worker.sock'}"
    rpc = make_rpc_thread(address)
    rpc.start()
    with grpc.insecure_channel(address) as channel:
        assert health_of(channel) == ["NOT_SERVING", "NOT_SERVING"]
        with pytest.raises(grpc.RpcError) as error_info:
            worker_pb2_grpc.WorkerServiceStub(channel).Attach(worker_pb2.AttachRequest(epoch=1))
        assert error_info.value.code() is grpc.StatusCode.UNAVAILABLE
        rpc.announce(make_runner(loaded))
        wait_until_serving(channel)
        assert health_of(channel) == ["SERVING", "SERVING"]
    rpc.stop()
    assert not (tmp_path / "worker.sock").exists()


def test_a_taken_address_is_refused(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'worker.sock'}"
    first, second = (make_rpc_thread(address) for _ in range(2))
    first.start()
    with pytest.raises(RuntimeError, match="in use"):
        second.start()
    with grpc.insecure_channel(address) as channel:
        assert health_of(channel) == ["NOT_SERVING", "NOT_SERVING"]
    # As a signal does that arrives now.
    second.end()
    first.stop()


def test_a_signal_after_the_end_changes_nothing(tmp_path: Path, loaded: LoadedModel) -> None:
    address = f"unix:{tmp_path / 'worker.sock'}"
    rpc = make_rpc_thread(address)
    rpc.start()
    with grpc.insecure_channel(address) as channel:
        rpc.announce(make_runner(loaded))
        wait_until_serving(channel)
    rpc.stop()
    assert rpc.try_leave()
    rpc.end()


def test_probes_tell_loading_from_waiting_for_the_domain(tmp_path: Path, loaded: LoadedModel) -> None:
    address, manage = f"unix:{tmp_path / 'worker.sock'}", f"unix:{tmp_path / 'manage.sock'}"
    rpc = make_rpc_thread(address, "--tp-size=2", manage_listen=manage)
    rpc.start()
    loading, waiting = "503 the weights are loading", "503 the failure domain's processes have not all joined"
    assert asyncio.run(probes(manage)) == {"livez": "200 ok", "startupz": loading, "readyz": loading}
    rpc.announce(make_runner(loaded))
    while (answers := asyncio.run(probes(manage)))["startupz"] == loading:
        pass
    assert answers == {"livez": "200 ok", "startupz": waiting, "readyz": waiting}
    rpc.stop()


def test_a_taken_management_address_is_refused(tmp_path: Path) -> None:
    manage = f"unix:{tmp_path / 'manage.sock'}"
    first, second = (make_rpc_thread(f"unix:{tmp_path / name}", manage_listen=manage) for name in "ab")
    first.start()
    with pytest.raises(RuntimeError, match=r"--manage-listen: .* in use"):
        second.start()
    first.stop()
