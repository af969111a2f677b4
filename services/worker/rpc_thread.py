"""The thread that serves RPC, so that the main thread is free to launch device work."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

import uvloop

from services.worker.servicer import SERVICE_NAME, WorkerServicer
from shared.health import Health
from shared.rpc import make_server

if TYPE_CHECKING:
    from services.worker.model_runner import ModelRunner

# For results that are on their way; the scheduler keeps its stream open, so all of it is spent when there is one.
_STOP_GRACE_S = 0.3


class RpcThread:
    """Serves `WorkerService` and health on one address: not serving until `announce`."""

    def __init__(self, address: str, servicer: WorkerServicer, *, reflection: bool) -> None:
        self._address = address
        self._servicer = servicer
        self._service_names = (SERVICE_NAME,) if reflection else ()
        self._health = Health((SERVICE_NAME,))
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._stop = asyncio.Event()
        # A process whose main thread fails must not live on in this one.
        self._thread = threading.Thread(target=self._run, name="rpc", daemon=True)

    def start(self) -> None:
        """Begin to listen.

        Raises:
            RuntimeError: the address is taken or not usable.
        """
        self._thread.start()
        self._started.result()

    def announce(self, runner: ModelRunner) -> None:
        """Let schedulers attach, and tell health checks so."""
        asyncio.run_coroutine_threadsafe(self._announce(runner), self._started.result()).result()

    def stop(self) -> None:
        """Refuse what is new, end what is open, return when all of it is over. After `start` only."""
        self._started.result().call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except Exception as error:  # noqa: BLE001 - `start` raises it
            self._started.set_exception(error)

    async def _serve(self) -> None:
        server = make_server(
            self._address, [self._servicer, self._health], internal=True, service_names=self._service_names
        )
        await server.start()
        self._started.set_result(asyncio.get_running_loop())
        await self._stop.wait()
        await self._health.set_serving(False)
        await server.stop(_STOP_GRACE_S)

    async def _announce(self, runner: ModelRunner) -> None:
        self._servicer.set_runner(runner)
        await self._health.set_serving(True)
