"""Fixtures shared by the tests of a worker's services."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from services.worker.models.loader import LoadedModel
from services.worker.process.device_loop import DeviceLoop
from services.worker.server.servicer import STUCK_S
from shared.network.rpc import make_channel, make_server
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.worker.worker_runner import load_exact, make_runner
from tests.support.worker.worker_service import Worker


@pytest.fixture(scope="module", autouse=True)
def _no_packed_cache() -> Iterator[None]:
    """Every load packs its weights itself, and no test reads or fills the developer's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_WORKER_PACKED_CACHE", "false")
        yield


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A small random model."""
    return load_exact(write_tiny_llama(tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": 2}))


@pytest.fixture
def device() -> Iterator[DeviceLoop]:
    """A device whose jobs run on a separate thread."""
    loop = DeviceLoop()
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield loop
    loop.stop()
    thread.join()


@pytest.fixture
def stuck_s() -> float:
    """The time after which a worker reports that it is stuck."""
    return STUCK_S


@pytest.fixture
async def loading_worker(device: DeviceLoop, stuck_s: float, tmp_path: Path) -> AsyncIterator[Worker]:
    """A worker that is being served, but has no weights yet."""
    address = f"unix:{tmp_path / 'worker.sock'}"
    async with make_channel(address, internal=True) as channel:
        worker = Worker(device, channel, stuck_s)
        server = make_server(address, [worker.servicer], internal=True)
        await server.start()
        yield worker
        await server.stop(0)


@pytest.fixture
def worker(loading_worker: Worker, loaded: LoadedModel) -> Worker:
    """A worker that is being served."""
    loading_worker.open(make_runner(loaded))
    return loading_worker


@pytest.fixture
def hold_device(device: DeviceLoop) -> Iterator[Callable[[], threading.Event]]:
    """Keep the device busy until the returned event is set."""
    holds: list[threading.Event] = []

    def hold() -> threading.Event:
        release = threading.Event()
        device.submit(release.wait)
        holds.append(release)
        return release

    yield hold
    for release in holds:
        release.set()
