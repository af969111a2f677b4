"""The tokenizer service of the tiny model, linked to fake schedulers over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from services.tokenizer.chat.template_renderer import RendererMaker
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.http.connections.limits import HttpLimits
from services.tokenizer.request.model import load_model
from services.tokenizer.server.servicer import TOKENIZER_SERVICE
from services.tokenizer.service import serve
from shared.model_files.model_dir import model_digest
from shared.network.rpc import make_channel, make_server
from shared.process.lifecycle import ANSWERS_CUT, StopRequest
from shared.wire import introduce_self
from tests.support.models.tiny_tokenizer import CONTEXT_LENGTH, IM_END_ID, VOCABULARY_SIZE
from tests.support.tokenizer.chat_templates import make_local_renderer
from tests.support.tokenizer.exchange_peer import ExchangePeer

NUM_POOL_TOKENS = 200


@dataclass
class Service:
    """A running tokenizer service.

    Attributes:
        stub: A stub of the service.
        channel: The stub's channel.
        peers: The fake schedulers it may link to, in its configured order.
        peer_servers: Their servers; stop one to kill its scheduler.
        stop: Set to stop the service.
        task: Returns the service's exit code.
        http_address: The address of its HTTP API; empty if there is none.
    """

    stub: Any
    channel: grpc.aio.Channel
    peers: list[ExchangePeer]
    peer_servers: list[grpc.aio.Server]
    stop: StopRequest
    task: asyncio.Task[int]
    http_address: str

    @property
    def peer(self) -> ExchangePeer:
        """The first scheduler."""
        return self.peers[0]

    async def until_health_is(self, status: health_pb2.HealthCheckResponse.ServingStatus, *, service: str = "") -> None:
        """Wait until the health of the whole server, or of a service, is `status`."""
        request = health_pb2.HealthCheckRequest(service=service)
        call = health_pb2_grpc.HealthStub(self.channel).Watch(request, wait_for_ready=True)
        async for response in call:
            if response.status == status:
                break
        call.cancel()

    async def link(self, number: int = 0) -> None:
        """Let a peer send its cell info, and wait until the service is serving."""
        self.peers[number].attach()
        await self.until_health_is(health_pb2.HealthCheckResponse.SERVING)
        await self.until_health_is(health_pb2.HealthCheckResponse.SERVING, service=TOKENIZER_SERVICE)

    async def begin(self, request: tokenizer_pb2.GenerateRequest) -> tuple[Any, exchange_pb2.Submit]:
        """Start a request; returns the call, after its accepted response, and the submit received by the first peer."""
        call = self.stub.Generate(request)
        accepted = await call.read()
        assert accepted.HasField("accepted")
        return call, await self.peer.submits.get()


@asynccontextmanager
async def run_tokenizer_service(
    model_dir: Path,
    socket_dir: Path,
    *,
    model_digest_of_cell: str | None = None,
    exact_fingerprint: str = "",
    num_schedulers: int = 1,
    logits_width: int = VOCABULARY_SIZE,
    http_limits: HttpLimits | None = None,
    make_renderer: RendererMaker = make_local_renderer,
    task: str = "",
    **settings: Any,
) -> AsyncIterator[Service]:
    """Run the service and its peers, which have not sent their cell info yet; the service must stop cleanly.

    Args:
        model_digest_of_cell: The model digest of the peers' cell; None means the same model.
        exact_fingerprint: The exact fingerprint of the peers' cell.
        num_schedulers: The number of peers, each a separate scheduler instance.
        logits_width: That of the peers' cell.
        http_limits: Those of the HTTP API, instead of the settings'.
        make_renderer: Renders chats; by default in the test's process, since one of its own takes a second to start.
        task: What the peers' cell serves the model for.
        settings: Further settings of the service.
    """
    cell_info = exchange_pb2.CellInfo(
        model_digest=model_digest_of_cell or model_digest(model_dir),
        context_length=CONTEXT_LENGTH,
        logits_width=logits_width,
        eos_token_ids=[IM_END_ID],
        num_pool_tokens=NUM_POOL_TOKENS,
        exact_fingerprint=exact_fingerprint,
        introduction=introduce_self().encode(),
        task=task,
    )
    peers, addresses, peer_servers = [], [], []
    for number in range(num_schedulers):
        peer_info = exchange_pb2.CellInfo(scheduler_instance_id=f"instance {number}")
        peer_info.MergeFrom(cell_info)
        peers.append(ExchangePeer(peer_info))
        addresses.append(f"unix:{socket_dir}/scheduler-{number}.sock")
        peer_servers.append(make_server(addresses[-1], [peers[-1]], internal=True))
        await peer_servers[-1].start()
    address = f"unix:{socket_dir}/tokenizer.sock"
    service_settings = TokenizerSettings(listen=address, scheduler=tuple(addresses), model_dir=model_dir, **settings)
    stop = StopRequest()
    model = load_model(service_settings, make_renderer=make_renderer)
    serving = asyncio.create_task(serve(service_settings, model, stop, http_limits=http_limits))
    async with make_channel(address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        try:
            yield Service(stub, channel, peers, peer_servers, stop, serving, settings.get("http_listen", ""))
        finally:
            # What a test has left in flight is not waited for.
            stop.set()
            stop.is_urgent.set()
            exit_code = await serving
            for peer_server in peer_servers:
                await peer_server.stop(grace=0)
    assert exit_code in {0, ANSWERS_CUT}


async def read_rest(call: Any) -> tuple[str, list[int], tokenizer_pb2.Finish]:
    """Read the rest of a stream of one choice; returns the joined text, the tokens and the finish."""
    text, token_ids, finish = "", [], None
    while (response := await call.read()) is not grpc.aio.EOF:
        assert finish is None, "a response after the last one"
        text += response.text
        token_ids += response.token_ids
        finish = response.finish if response.HasField("finish") else None
    assert finish is not None, "the stream ended without a finish"
    return text, token_ids, finish
