"""A cell with two of each service, whose processes a test replaces one after the other."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import grpc

from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from shared.health import wait_until_serving
from shared.rpc import make_channel
from tests.support.chaos import SCHEDULER_FLAGS, TOKENIZER_FLAGS, WORKER_FLAGS
from tests.support.client import Client
from tests.support.patience import PATIENCE_S
from tests.support.processes import start_service

_NUMBERS = (0, 1)
_RETRY_S = 0.05


class RollingCell:
    """Two DP ranks, two schedulers of which one holds them, and two tokenizers; a service is named `ROLE NUMBER`."""

    def __init__(self, model_dir: Path, directory: Path, stack: ExitStack, *, drain_s: float) -> None:
        """Start all but the second scheduler; `drain_s` is that of the schedulers."""
        self._model_dir = model_dir
        self._directory = directory
        self._stack = stack
        self._drain_s = drain_s
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("worker 0", "worker 1", "scheduler 0", "tokenizer 0", "tokenizer 1"):
            self.start(name)

    def start(self, name: str) -> None:
        """Start a service that is not running."""
        role, _, number = name.partition(" ")
        flags = getattr(self, f"_{role}_flags")(int(number))
        service = start_service(role, f"--listen={self.address(name)}", *flags)
        self._processes[name] = self._stack.enter_context(service)

    async def drain(self, name: str) -> int:
        """Ask a service to end, and wait for it; returns its exit code."""
        process = self._processes.pop(name)
        process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(process.wait, PATIENCE_S)

    async def wait_until_serving(self, name: str) -> None:
        """Wait until a service reports SERVING; fails after five minutes."""
        async with asyncio.timeout(PATIENCE_S), make_channel(self.address(name), internal=True) as channel:
            await wait_until_serving(channel)

    def address(self, name: str) -> str:
        """Where a service listens."""
        return f"unix:{self._directory}/{name.replace(' ', '-')}.sock"

    def _worker_flags(self, number: int) -> list[str]:
        place = [f"--dp-rank={number}", f"--dp-size={len(_NUMBERS)}"]
        model = [f"--model-dir={self._model_dir}", "--ops-backend=reference", "--num-threads=1"]
        return [*place, *model, *WORKER_FLAGS]

    def _scheduler_flags(self, number: int) -> list[str]:
        workers = ",".join(self.address(f"worker {rank}") for rank in _NUMBERS)
        links = [f"--cell-listen={self.cell_address(number)}", f"--workers={workers}"]
        return [*links, f"--drain-s={self._drain_s}", *SCHEDULER_FLAGS]

    def _tokenizer_flags(self, _: int) -> list[str]:
        schedulers = ",".join(map(self.cell_address, _NUMBERS))
        return [f"--model-dir={self._model_dir}", f"--scheduler={schedulers}", *TOKENIZER_FLAGS]

    def cell_address(self, number: int) -> str:
        """Where a scheduler serves tokenizers and operators."""
        return f"unix:{self._directory}/cell-{number}.sock"


class RollingClient(Client):
    """Calls whichever tokenizer takes a request, and asks the scheduler that holds the workers for its state."""

    def __init__(
        self, tokenizers: list[grpc.aio.Channel], schedulers: list[grpc.aio.Channel], cells: list[grpc.aio.Channel]
    ) -> None:
        super().__init__(tokenizers[0], schedulers[0], cells[0])
        self.tokenizer = _EitherTokenizer(tokenizers)
        self._schedulers = [scheduler_pb2_grpc.SchedulerServiceStub(channel) for channel in cells]

    async def state(self) -> scheduler_pb2.GetStateResponse:
        """The state of the scheduler that holds a worker, else of one that is up.

        Raises:
            grpc.aio.AioRpcError: Neither is.
        """
        answers = await asyncio.gather(
            *(stub.GetState(scheduler_pb2.GetStateRequest()) for stub in self._schedulers), return_exceptions=True
        )
        states = [answer for answer in answers if isinstance(answer, scheduler_pb2.GetStateResponse)]
        if states:
            return max(states, key=lambda state: state.ready)
        raise next(answer for answer in answers if isinstance(answer, BaseException))


class _EitherTokenizer:
    """Stands in for a stub: a call goes to the other tokenizer if the first one is unavailable before it answers."""

    def __init__(self, channels: list[grpc.aio.Channel]) -> None:
        self._stubs = [tokenizer_pb2_grpc.TokenizerServiceStub(channel) for channel in channels]

    async def Generate(self, request: tokenizer_pb2.GenerateRequest) -> AsyncIterator[tokenizer_pb2.GenerateResponse]:
        while True:
            is_begun = False
            try:
                async for response in self._stubs[0].Generate(request):
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
def run_rolling_cell(model_dir: Path, directory: Path, *, drain_s: float) -> Iterator[RollingCell]:
    """Start a cell without waiting until it serves; its processes are killed at the end."""
    with ExitStack() as stack:
        yield RollingCell(model_dir, directory, stack, drain_s=drain_s)


@asynccontextmanager
async def connect_to_all(cell: RollingCell) -> AsyncIterator[RollingClient]:
    """Connect to both tokenizers and both schedulers, each on both of its ports."""
    async with AsyncExitStack() as stack:

        async def open_to(addresses: Iterable[str]) -> list[grpc.aio.Channel]:
            return [await stack.enter_async_context(make_channel(address)) for address in addresses]

        tokenizers = await open_to(cell.address(f"tokenizer {number}") for number in _NUMBERS)
        schedulers = await open_to(cell.address(f"scheduler {number}") for number in _NUMBERS)
        yield RollingClient(tokenizers, schedulers, await open_to(map(cell.cell_address, _NUMBERS)))
