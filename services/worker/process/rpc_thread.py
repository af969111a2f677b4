"""The thread that serves RPC, so that the main thread is free for device work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

import uvloop

from services.worker.metrics import WorkerCollector
from services.worker.parallel.rendezvous import Rendezvous
from services.worker.process.exits import DomainEnd, ExitCode
from shared.network.health import Health
from shared.network.management import serve_management
from shared.network.probes import Probes
from shared.network.rpc import MAX_CELL_CONNECTIONS, ServerLimits, Servicer, make_server
from shared.network.tls import Certificates
from shared.process.lifecycle import wait_for_handlers
from shared.process.metrics import make_process_registry
from shared.process.open_files import share_open_files

if TYPE_CHECKING:
    from services.worker.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# Time for results still being sent. The scheduler keeps its stream open: while one is connected all of it is spent.
_STOP_GRACE_S = 0.3


class Role(Protocol):
    """A process's part in its failure domain: leader or member. Belongs to the RPC thread's event loop."""

    servicers: tuple[Servicer, ...]
    """What it serves besides health."""
    service_names: tuple[str, ...]

    async def meet(self) -> Rendezvous | None:
        """Learn where the ranks of this start of the domain connect to each other; None if there is only one.

        Returns when that is known, which may take long. A leader tells its followers.

        Raises:
            NotMetError: it did not become known in time.
        """

    async def open(self, runner: ModelRunner) -> None:
        """Begin, once the weights are loaded; returns when the process is ready."""

    def leave(self) -> None:
        """The domain was asked to end: end this process once it has been drained. Only after `open`."""

    async def close(self) -> None:
        """Say goodbye to the domain's other processes."""


class RpcThread:
    """Serves a role, health and the management port; health says "serving" while the role is open and not leaving.

    `probes` belong to the thread's event loop.
    """

    def __init__(
        self,
        address: str,
        role: Role,
        end: DomainEnd,
        *,
        reflection: bool,
        manage_listen: str | None,
        certificates: Certificates | None = None,
    ) -> None:
        self.probes = Probes("the weights are loading")
        self._collector = WorkerCollector()
        self._manage_listen = manage_listen
        self._address = address
        self._certificates = certificates
        self._role = role
        self._end = end
        self._reflected: Sequence[str] = role.service_names if reflection else ()
        self._health = Health(role.service_names)
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._is_open = False
        self._stop = asyncio.Event()
        # A daemon: when the main thread fails, this one must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="rpc", daemon=True)

    def start(self) -> None:
        """Start listening.

        Raises:
            RuntimeError: the address is taken or unusable.
        """
        self._thread.start()
        self._started.result()

    def meet(self) -> Future[Rendezvous | None]:
        """Begin to meet the domain's other processes; see `Role`. Only after `start`."""
        return asyncio.run_coroutine_threadsafe(self._role.meet(), self._started.result())

    def announce(self, runner: ModelRunner) -> None:
        """Open the role, and report "serving" once the failure domain is complete. Does not wait."""
        asyncio.run_coroutine_threadsafe(self._announce(runner), self._started.result())

    def try_leave(self) -> bool:
        """Begin to leave the failure domain; False if the role is not open yet. From any thread."""
        if self._is_open:
            self._call(self._end.leave, "asked to end")
        return self._is_open

    def end(self) -> None:
        """End the process at once, with a goodbye to its partners. From any thread, after `start`."""
        self._call(self._end.stop, "asked to end at once")

    def stop(self) -> None:
        """Refuse new calls, end open ones and join the thread. Only after `start`."""
        self._started.result().call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _call(self, end: Callable[[str], None], why: str) -> None:
        """Call it on the event loop. A signal may come when that could not start or has ended; so does the process."""
        with contextlib.suppress(RuntimeError):
            self._started.result().call_soon_threadsafe(end, why)

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except Exception as error:  # noqa: BLE001 - raised by `start`
            self._started.set_exception(error)

    async def _serve(self) -> None:
        servicers = [*self._role.servicers, self._health]
        (num_connections,) = share_open_files(MAX_CELL_CONNECTIONS)
        server = make_server(
            self._address,
            servicers,
            internal=True,
            service_names=self._reflected,
            certificates=self._certificates,
            limits=ServerLimits(max_connections=num_connections),
        )
        registry = make_process_registry(self._collector, self._certificates)
        management = await serve_management(self._manage_listen, registry, self.probes)
        await server.start()
        self._started.set_result(asyncio.get_running_loop())
        await self._stop.wait()
        self.probes.is_leaving = True
        await self._health.set_serving(False)
        self._end.stopping.set()
        await self._role.close()
        await server.stop(_STOP_GRACE_S)
        await wait_for_handlers()
        if management is not None:
            management.close()

    async def _announce(self, runner: ModelRunner) -> None:
        self._collector.runner = runner
        self.probes.set_waiting("the failure domain's processes have not all joined")
        try:
            await self._role.open(runner)
        except Exception:
            logger.exception("cannot start serving")
            self._end.fail(ExitCode.BUG, "cannot start serving")
        self._is_open = True
        await self._health.set_serving(True)
        self.probes.set_started()
        logger.info("serving", extra={"address": self._address})
        await self._end.leaving.wait()
        self.probes.is_leaving = True
        await self._health.set_serving(False)
        self._role.leave()
