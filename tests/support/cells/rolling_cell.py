"""A cell with two of each service, whose processes a test replaces one after the other."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from typing_extensions import override

from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from shared.network.rpc import make_channel
from tests.support.cells.chaos import SCHEDULER_FLAGS, TOKENIZER_FLAGS, WORKER_FLAGS
from tests.support.clients.client import Client
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import ROOT, start_service
from tests.support.system.serving import wait_until_serving
from tests.support.system.tcp_path import TcpPath

_NUMBERS = (0, 1)
_RETRY_S = 0.05
_POLL_S = 0.02
# A scheduler that is stopped does not answer.
_ANSWER_S = 1.0


class RollingCell:
    """Two DP ranks, two schedulers of which one holds them, and two tokenizers; a service is named `ROLE NUMBER`."""

    def __init__(
        self, model_dir: Path, directory: Path, stack: ExitStack, *, drain_s: float = 30.0, root: Path = ROOT
    ) -> None:
        """Start all but the second scheduler, from the modules in `root`; `drain_s` is that of the schedulers."""
        self._model_dir = model_dir
        self._directory = directory
        self._stack = stack
        self._drain_s = drain_s
        self._root = root
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: dict[str, list[Path]] = {}
        for name in ("worker 0", "worker 1", "scheduler 0", "tokenizer 0", "tokenizer 1"):
            self.start(name)

    def start(self, name: str, *, root: Path | None = None) -> None:
        """Start a service that is not running; `root` is where its modules are, if not where the others' are."""
        role, _, number = name.partition(" ")
        flags = getattr(self, f"_{role}_flags")(int(number))
        log = self._new_log(name) if role == "worker" else None
        service = start_service(role, f"--listen={self.address(name)}", *flags, log=log, root=root or self._root)
        self._processes[name] = self._stack.enter_context(service)

    async def drain(self, name: str) -> int:
        """Ask a service to end, and wait for it; returns its exit code."""
        self.send_signal(name, signal.SIGTERM)
        return await self.wait_for_exit(name)

    async def kill(self, name: str) -> None:
        """Kill a service, and wait until it is gone."""
        self.send_signal(name, signal.SIGKILL)
        await self.wait_for_exit(name)

    def send_signal(self, name: str, signal_number: int) -> None:
        """Send a signal to a service."""
        self._processes[name].send_signal(signal_number)

    async def wait_for_exit(self, name: str) -> int:
        """Wait until a service has ended; returns its exit code."""
        exit_code = await asyncio.to_thread(self._processes[name].wait, PATIENCE_S)
        del self._processes[name]
        return exit_code

    def has_exited(self, name: str) -> bool:
        """Whether a service has ended."""
        return self._processes[name].poll() is not None

    def logs(self, name: str) -> list[Path]:
        """The log of each process of a worker, oldest first."""
        return self._logs[name]

    def _new_log(self, name: str) -> Path:
        logs = self._logs.setdefault(name, [])
        logs.append(self._directory / f"{name.replace(' ', '-')}-{len(logs)}.log")
        return logs[-1]

    async def wait_until_serving(self, name: str) -> None:
        """Wait until a service reports SERVING; fails after five minutes."""
        async with asyncio.timeout(PATIENCE_S), make_channel(self.address(name), internal=True) as channel:
            await wait_until_serving(channel)

    def address(self, name: str) -> str:
        """Where a service listens."""
        return f"unix:{self._directory}/{name.replace(' ', '-')}.sock"

    def _worker_flags(self, number: int) -> list[str]:
        place = [f"--dp-rank={number}", f"--dp-size={len(_NUMBERS)}"]
        model = [f"--model-dir={self._model_dir}", "--ops-backend=reference", "--num-threads=1", "--log-format=json"]
        return [*place, *model, *WORKER_FLAGS]

    def _scheduler_flags(self, number: int) -> list[str]:
        workers = ",".join(self.address_for_scheduler(number, rank) for rank in _NUMBERS)
        links = [f"--cell-listen={self.cell_address(number)}", f"--workers={workers}"]
        return [*links, f"--drain-s={self._drain_s}", *SCHEDULER_FLAGS]

    def _tokenizer_flags(self, _: int) -> list[str]:
        schedulers = ",".join(map(self.address_for_tokenizers, _NUMBERS))
        return [f"--model-dir={self._model_dir}", f"--scheduler={schedulers}", *TOKENIZER_FLAGS]

    def cell_address(self, number: int) -> str:
        """Where a scheduler serves tokenizers and operators."""
        return f"unix:{self._directory}/cell-{number}.sock"

    def address_for_tokenizers(self, number: int) -> str:
        """Where the tokenizers find a scheduler."""
        return self.cell_address(number)

    def address_for_scheduler(self, number: int, rank: int) -> str:
        """Where a scheduler finds a worker."""
        return self.address(f"worker {rank}")


class PathedCell(RollingCell):
    """A rolling cell in which each scheduler is linked to workers and tokenizers over its own paths, to be cut."""

    def __init__(self, model_dir: Path, directory: Path, stack: ExitStack, paths: SchedulerPaths) -> None:
        self._paths = paths
        super().__init__(model_dir, directory, stack)

    @override
    def address(self, name: str) -> str:
        role, _, number = name.partition(" ")
        return f"127.0.0.1:{self._paths.worker_ports[int(number)]}" if role == "worker" else super().address(name)

    @override
    def cell_address(self, number: int) -> str:
        return f"127.0.0.1:{self._paths.cell_ports[number]}"

    @override
    def address_for_tokenizers(self, number: int) -> str:
        return f"127.0.0.1:{self._paths.from_tokenizers[number].port}"

    @override
    def address_for_scheduler(self, number: int, rank: int) -> str:
        return f"127.0.0.1:{self._paths.to_workers[number][rank].port}"


class SchedulerPaths:
    """The network around two schedulers: ports of workers and schedulers, and a path for each of their links."""

    def __init__(self) -> None:
        """Prepare the paths; entering the context opens them."""
        self.worker_ports = [free_port() for _ in _NUMBERS]
        self.cell_ports = [free_port() for _ in _NUMBERS]
        self.to_workers = [[TcpPath(port) for port in self.worker_ports] for _ in _NUMBERS]
        self.from_tokenizers = [TcpPath(port) for port in self.cell_ports]
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> SchedulerPaths:
        for number in _NUMBERS:
            for path in self.of(number):
                await self._stack.enter_async_context(path)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def of(self, number: int) -> list[TcpPath]:
        """All paths of a scheduler."""
        return [*self.to_workers[number], self.from_tokenizers[number]]


class RollingClient(Client):
    """Calls whichever tokenizer takes a request, and asks the scheduler that holds the workers for its state.

    Attributes:
        schedulers: A stub of each scheduler's client port.
    """

    def __init__(
        self, tokenizers: list[grpc.aio.Channel], schedulers: list[grpc.aio.Channel], cells: list[grpc.aio.Channel]
    ) -> None:
        super().__init__(tokenizers[0], schedulers[0], cells[0])
        self.tokenizer = _EitherTokenizer(tokenizers)
        self.schedulers: list[Any] = [scheduler_pb2_grpc.SchedulerServiceStub(channel) for channel in schedulers]
        self._operators: list[Any] = [scheduler_pb2_grpc.SchedulerServiceStub(channel) for channel in cells]

    async def state_of(self, number: int) -> scheduler_pb2.GetStateResponse | None:
        """The state of one scheduler; None if it does not answer."""
        try:
            state: scheduler_pb2.GetStateResponse = await self._operators[number].GetState(
                scheduler_pb2.GetStateRequest(), timeout=_ANSWER_S
            )
        except grpc.aio.AioRpcError:
            return None
        return state

    async def wait_for_state_of(
        self, number: int, condition: Callable[[scheduler_pb2.GetStateResponse], object]
    ) -> scheduler_pb2.GetStateResponse:
        """Wait until one scheduler answers and its state meets a condition; fails after five minutes."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                state = await self.state_of(number)
                if state is not None and condition(state):
                    return state
                await asyncio.sleep(_POLL_S)

    async def wait_until_leading(self, number: int) -> scheduler_pb2.GetStateResponse:
        """Wait until one scheduler holds every worker; returns its state."""
        return await self.wait_for_state_of(number, lambda state: all(rank.is_attached for rank in state.rank_steps))

    async def state(self) -> scheduler_pb2.GetStateResponse:
        """The state of the scheduler that holds a worker, else of one that is up.

        Raises:
            grpc.aio.AioRpcError: Neither is.
        """
        answers = await asyncio.gather(
            *(stub.GetState(scheduler_pb2.GetStateRequest(), timeout=_ANSWER_S) for stub in self._operators),
            return_exceptions=True,
        )
        states = [answer for answer in answers if isinstance(answer, scheduler_pb2.GetStateResponse)]
        if states:
            return max(states, key=lambda state: state.ready)
        raise next(answer for answer in answers if isinstance(answer, BaseException))


class _EitherTokenizer:
    """Stands in for a stub: a call goes to the other tokenizer if the first one is unavailable before it answers."""

    def __init__(self, channels: list[grpc.aio.Channel]) -> None:
        self._stubs = [tokenizer_pb2_grpc.TokenizerServiceStub(channel) for channel in channels]

    async def Generate(
        self,
        request: tokenizer_pb2.GenerateRequest,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - a stub's
        metadata: tuple[tuple[str, str], ...] | None = None,
    ) -> AsyncIterator[tokenizer_pb2.GenerateResponse]:
        while True:
            is_begun = False
            try:
                async for response in self._stubs[0].Generate(request, timeout=timeout, metadata=metadata):
                    is_begun = True
                    yield response
            except grpc.aio.AioRpcError as error:
                if is_begun or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                self._stubs.reverse()
                await asyncio.sleep(_RETRY_S)
            else:
                return


@contextmanager
def run_rolling_cell(
    model_dir: Path, directory: Path, *, drain_s: float = 30.0, root: Path = ROOT
) -> Iterator[RollingCell]:
    """Start a cell without waiting until it serves; its processes are killed at the end."""
    with ExitStack() as stack:
        yield RollingCell(model_dir, directory, stack, drain_s=drain_s, root=root)


@asynccontextmanager
async def run_pathed_cell(model_dir: Path, directory: Path) -> AsyncIterator[tuple[PathedCell, SchedulerPaths]]:
    """Start a cell whose schedulers can be cut off; otherwise as `run_rolling_cell`."""
    async with SchedulerPaths() as paths:
        with ExitStack() as stack:
            yield PathedCell(model_dir, directory, stack, paths), paths


@asynccontextmanager
async def connect_to_all(cell: RollingCell) -> AsyncIterator[RollingClient]:
    """Connect to both tokenizers and both schedulers, each on both of its ports."""
    async with AsyncExitStack() as stack:

        async def open_to(addresses: Iterable[str]) -> list[grpc.aio.Channel]:
            return [await stack.enter_async_context(make_channel(address)) for address in addresses]

        tokenizers = await open_to(cell.address(f"tokenizer {number}") for number in _NUMBERS)
        schedulers = await open_to(cell.address(f"scheduler {number}") for number in _NUMBERS)
        yield RollingClient(tokenizers, schedulers, await open_to(map(cell.cell_address, _NUMBERS)))
