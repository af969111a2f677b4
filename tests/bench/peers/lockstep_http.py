"""Our tokenizer service as a contestant: from the bytes of a step's outputs to bytes on the clients' sockets."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from prometheus_client import CollectorRegistry

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.answer.request_totals import RequestTotals
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.exchange.cell_requests import CellRequests
from services.tokenizer.exchange.scheduler_client import SchedulerClient
from services.tokenizer.http.backend import Backend
from services.tokenizer.http.connections.access import Access
from services.tokenizer.http.connections.limits import HttpLimits
from services.tokenizer.http.connections.server import serve_http
from services.tokenizer.http.routes import make_app
from services.tokenizer.request.model import load_model
from services.tokenizer.server.generate import CallTerms, GenerateCall
from services.tokenizer.server.live_requests import LiveRequests
from services.tokenizer.server.servicer import TokenizerServicer
from services.tokenizer.service import SWITCH_INTERVAL_S
from shared.network.probes import Probes
from shared.network.rpc import make_server
from shared.process.lifecycle import freeze_garbage
from shared.request.limits import TOKEN_DTYPE
from shared.wire import introduce_self
from tests.bench.peers.http_load import CLIENTS, MODEL_NAME, PROMPT, StreamLoad, until
from tests.bench.peers.protocol import serve, start_process
from tests.support.system.ports import free_port

LOST_AFTER_S = 3600.0
CONTEXT_LENGTH = 8192
LOGITS_WIDTH = 49152
NUM_POOL_TOKENS = 2**24
TOKEN_ID = 1000


class LockstepServer:
    """The service's two doors, linked to a cell that is this process: its stream is fed without gRPC."""

    def __init__(self, model_dir: Path) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        settings = TokenizerSettings(model_dir=model_dir, model_name=MODEL_NAME)
        self._max_unread_s = settings.max_unread_s
        self.model = load_model(settings)
        self.live, self.totals = LiveRequests(), RequestTotals()
        self._addresses = {kind: f"127.0.0.1:{free_port()}" for kind in ("grpc", "http")}
        self._num_handed_over = 0

    async def start(self) -> None:
        """See `Server`."""
        self._submits: asyncio.Queue[exchange_pb2.Submit] = asyncio.Queue()
        self.scheduler = SchedulerClient((), self.model.digest, CellRequests(LOST_AFTER_S), _ignore, silence_s=3.0)
        self._stream = self.scheduler.open()
        self._stream.note_cell_info(
            exchange_pb2.CellInfo(
                model_digest=self.model.digest,
                context_length=CONTEXT_LENGTH,
                logits_width=LOGITS_WIDTH,
                num_pool_tokens=NUM_POOL_TOKENS,
                introduction=introduce_self().encode(),
            )
        )
        self._stream.note_heartbeat(exchange_pb2.SchedulerHeartbeat(holds_workers=True))
        await self.scheduler.on_heard(self._stream)
        self._tasks = [asyncio.create_task(self._receive_submits())]
        servicer = TokenizerServicer(
            self.model, self.scheduler, self.live, totals=self.totals, max_unread_s=self._max_unread_s
        )
        self._grpc = make_server(self._addresses["grpc"], [servicer])
        await self._grpc.start()
        backend = Backend(
            self.model, self.scheduler, self.live, self.totals, self._max_unread_s, (MODEL_NAME,), Probes("")
        )
        address = self._addresses["http"]
        limits = HttpLimits()
        access = Access(address, (), ())
        max_requests = limits.max_connections
        app = make_app(backend, access, CollectorRegistry(), body_s=limits.body_s, max_requests=max_requests)
        self._http = await serve_http(address, app, certificates=None, limits=limits)
        freeze_garbage()

    def address(self, kind: str) -> str:
        """See `Server`."""
        return self._addresses["grpc" if kind == "grpc" else "http"]

    async def submitted(self, num_requests: int) -> Sequence[int]:
        """See `Server`."""
        return [(await self._submits.get()).handle for _ in range(num_requests)]

    def encode_step(self, requests: Sequence[int], index: int, token_ids: Sequence[int], *, is_last: bool) -> bytes:
        """See `Server`."""
        count = len(requests)
        outputs = exchange_pb2.Outputs(
            handles=np.array(requests, np.uint32).tobytes(),
            first_indexes=np.full(count, index, TOKEN_DTYPE).tobytes(),
            counts=np.ones(count, TOKEN_DTYPE).tobytes(),
            token_ids=np.array(token_ids, TOKEN_DTYPE).tobytes(),
        )
        if index == 0:
            outputs.starts.extend(exchange_pb2.RequestStart(handle=handle) for handle in requests)
        if is_last:
            outputs.ends.extend(
                exchange_pb2.RequestEnd(
                    handle=handle,
                    finish_reason=common_pb2.FINISH_REASON_MAX_TOKENS,
                    num_completion_tokens=index + 1,
                )
                for handle in requests
            )
        return exchange_pb2.ExchangeResponse(outputs=outputs).SerializeToString()

    def hand_over(self, message: bytes) -> None:
        """See `Server`."""
        outputs = exchange_pb2.ExchangeResponse.FromString(message).outputs
        self._num_handed_over += len(outputs.handles) // 4
        self.scheduler.requests.on_outputs(self._stream, outputs)

    def has_taken_all(self) -> bool:
        """See `Server`."""
        return self.totals.num_generation_tokens == self._num_handed_over

    async def _receive_submits(self) -> None:
        async for message in self._stream.messages():
            for submit in message.submits:
                self._submits.put_nowait(submit)


class DiscardLoad(StreamLoad):
    """The same streams without a client: what their writers do is left out."""

    _server: LockstepServer

    def _start_clients(self, _kind: str, _client_python: str) -> None:
        self._message = tokenizer_pb2.GenerateRequest()
        self._message.chat.messages.add(role=tokenizer_pb2.ROLE_USER, content=PROMPT)
        self._message.sampling.max_tokens, self._message.sampling.ignore_eos = self._num_tokens, True

    async def _read_streams(self) -> dict[str, float]:
        counts = [_Discard() for _ in range(self._num_streams)]
        await asyncio.gather(*(self._generate(count) for count in counts))
        return {
            "num_pieces": sum(count.num_pieces for count in counts),
            "num_text_bytes": sum(count.num_text_bytes for count in counts),
        }

    async def _generate(self, writer: _Discard) -> None:
        server = self._server
        call = GenerateCall(
            server.model, server.scheduler, server.live, writer, totals=server.totals, terms=CallTerms()
        )
        await call.serve(self._message)


class _Discard:
    """A writer that only counts, for the check of the whole."""

    def __init__(self) -> None:
        self.num_pieces = 0
        self.num_text_bytes = 0

    async def write(self, response: tokenizer_pb2.GenerateResponse) -> None:
        """See `Writer`."""
        if response.token_ids:
            self.num_pieces += 1
            self.num_text_bytes += len(response.text)


class FirstTokenLoad:
    """One request at a time by gRPC and by HTTP, in turn; the cell answers each at once with its only token."""

    def __init__(self, *, model_dir: str, num_requests: int, client_python: str) -> None:
        self._num_requests = num_requests
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._server = LockstepServer(Path(model_dir))
        self._runner.run(self._server.start())
        self._stack = ExitStack()
        self._clients = self._stack.enter_context(start_process("the clients", client_python, CLIENTS))
        self._runner.run(self._answer(self._start_clients))

    def run(self) -> dict[str, float]:
        """Run one repeat; returns the clients' figures."""
        figures: dict[str, float]
        figures, _ = self._runner.run(self._answer(self._clients.run))
        return figures

    def _start_clients(self) -> None:
        self._clients.start(
            "first_tokens",
            address=self._server.address("grpc"),
            http_address=self._server.address("http"),
            num_requests=self._num_requests,
        )

    async def _answer(self, run: Callable[[], Any]) -> Any:
        """Answer the requests that `run` sends from a thread; returns its result."""
        clients = asyncio.create_task(asyncio.to_thread(run))
        for _ in range(2 * self._num_requests):
            requests = await until(self._server.submitted(1), clients)
            self._server.hand_over(self._server.encode_step(requests, 0, [TOKEN_ID], is_last=True))
        return await clients


async def _ignore() -> None:
    pass


if __name__ == "__main__":
    serve({
        "streams": partial(StreamLoad, LockstepServer),
        "discard": partial(DiscardLoad, LockstepServer),
        "first_tokens": FirstTokenLoad,
    })  # fmt: skip
