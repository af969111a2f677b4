"""The scheduler's RPCs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

import grpc

from lockstep.internal.v1 import exchange_pb2, exchange_pb2_grpc
from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.scheduler.cell.requests.tenant_totals import TenantState
from services.scheduler.cell.state import RankState
from services.scheduler.server.cell_server import CellServer
from services.scheduler.server.client_link import LAST_WORDS_S, ClientLink
from services.scheduler.server.event_codec import describe_event
from services.scheduler.server.exchange_codec import decode_request
from shared.errors import InternalError, InvalidRequestError, ServiceError, Violation
from shared.network.access import get_caller
from shared.network.response_writer import ResponseWriter
from shared.request.request_fields import read_time_left
from shared.wire import TIMINGS, introduce_self, lower_of, read_introduction

logger = logging.getLogger(__name__)

EXCHANGE_SERVICE = "lockstep.internal.v1.ExchangeService"
SCHEDULER_SERVICE = "lockstep.v1.SchedulerService"
ADMIN_SERVICE = "lockstep.v1.SchedulerAdminService"


class ExchangeServicer(exchange_pb2_grpc.ExchangeServiceServicer):
    """Serves tokenizer replicas."""

    def __init__(self, cell: CellServer) -> None:
        self._cell = cell

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with `server`."""
        exchange_pb2_grpc.add_ExchangeServiceServicer_to_server(self, server)

    async def Exchange(
        self, request_iterator: AsyncIterator[exchange_pb2.ExchangeRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """See exchange.proto."""
        client = self._cell.connect()
        tasks = [
            asyncio.create_task(self._read(request_iterator, client)),
            asyncio.create_task(self._write(client, context)),
        ]
        try:
            # Any task that ends closes the link, and closing a link does not wait for a replica that is not reading.
            error = await asyncio.shield(client.closed)
            await asyncio.wait(tasks[1:], timeout=LAST_WORDS_S)
            if error is not None:
                raise error
        finally:
            for task in tasks:
                task.cancel()
            self._cell.disconnect(client)

    async def _read(self, requests: AsyncIterator[exchange_pb2.ExchangeRequest], client: ClientLink) -> None:
        with _closing(client):
            async for message in requests:
                if client.is_closed:
                    # The engine knows, or will soon, that the replica is gone; nothing would end a new request.
                    return
                if message.HasField("introduction"):
                    introduction = lower_of(introduce_self(), read_introduction(message.introduction))
                    client.has_timings = TIMINGS in introduction.capabilities
                    facts = {"release": message.introduction.release, "wire_version": message.introduction.wire_version}
                    logger.info("a replica is linked", extra={"client": client.number, **facts})
                client.note_alive(is_heartbeat=message.is_heartbeat)
                self._cell.replica_drains.note(client.number, is_draining=message.is_draining)
                self._cell.trials.note(client.number, is_trying=message.is_trying)
                if message.submits or message.stop_ats or message.abort_handles:
                    self._cell.on_event(decode_request(client.number, message))

    async def _write(self, client: ClientLink, context: grpc.aio.ServicerContext) -> None:
        # Written, not yielded: a generator that is cancelled during a write ends only when it is garbage-collected, and
        # the replica's requests would hold their blocks until then.
        with _closing(client), suppress(grpc.aio.BaseError):
            # An error here means that the stream is over, which the handler is notified of as well.
            async for message in client.messages():
                await context.write(message)


@contextmanager
def _closing(client: ClientLink) -> Iterator[None]:
    """Close the link with the error that ended the block; the text of a bug is not sent."""
    try:
        yield
    except ServiceError as error:
        client.close(error)
    except Exception:
        logger.exception("a replica's stream ends: a bug", extra={"client": client.number})
        client.close(InternalError("internal error"))
    else:
        client.close(None)


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Serves direct clients on the client port, and the cell's state on the cell port; see scheduler.proto."""

    def __init__(self, cell: CellServer, max_unread_s: float) -> None:
        """A client that reads nothing for `max_unread_s` loses its answer."""
        self._cell = cell
        self._max_unread_s = max_unread_s

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with `server`."""
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, server)

    async def Generate(
        self, request: scheduler_pb2.SchedulerServiceGenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """See scheduler.proto."""
        time_left_s = read_time_left(context.time_remaining())
        with ResponseWriter(context, self._max_unread_s) as writer:
            await self._cell.direct_clients.generate(
                request, writer.write, time_left_s=time_left_s, client=get_caller()
            )

    async def Abort(
        self, request: scheduler_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.AbortResponse:
        """See scheduler.proto."""
        self._cell.direct_clients.abort(request, get_caller())
        return scheduler_pb2.AbortResponse()

    async def GetState(
        self, request: scheduler_pb2.GetStateRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetStateResponse:
        """See scheduler.proto."""
        state, clock = self._cell.engine.state(), self._cell.clock
        counters, limits = state.counters, self._cell.engine.facts.limits
        return scheduler_pb2.GetStateResponse(
            instance_id=self._cell.instance_id,
            ready=state.ready,
            takes_work=state.takes_work,
            num_waiting=state.num_waiting,
            num_running=state.num_running,
            block_size=state.block_size,
            num_blocks=state.num_blocks,
            num_used_blocks=state.num_used_blocks,
            num_cached_blocks=state.num_cached_blocks,
            num_free_blocks=state.num_free_blocks,
            num_checkpoints=state.num_checkpoints,
            num_used_checkpoints=state.num_used_checkpoints,
            num_prefix_tokens_lost_to_state=counters.num_prefix_tokens_lost_to_state,
            num_prefill_steps=sum(rank.num_steps.prefill + rank.num_steps.mixed for rank in state.ranks),
            num_decode_steps=sum(rank.num_steps.decode for rank in state.ranks),
            num_preemptions=counters.num_preemptions,
            num_prefix_queried_tokens=counters.num_prefix_queried_tokens,
            num_completion_tokens=counters.num_completion_tokens,
            num_prefix_hit_tokens=counters.num_prefix_hit_tokens,
            num_finished=counters.num_finished,
            num_lost_epochs=counters.num_lost_epochs,
            num_draft_tokens=counters.num_draft_tokens,
            num_accepted_draft_tokens=counters.num_accepted_tokens,
            num_recoveries=counters.num_recoveries,
            num_suspects=state.num_suspects,
            num_poison_requests=counters.num_poison_requests,
            num_late_results=counters.num_late_results,
            rank_steps=[_describe_rank(rank) for rank in state.ranks if not rank.is_vacant],
            events=[describe_event(event, clock) for event in state.events],
            tenants=[_describe_tenant(tenant) for tenant in self._cell.engine.tenants()],
            time=clock.now(),
            context_length=0 if limits is None else limits.context_length,
            num_pool_tokens=0 if limits is None else limits.num_pool_tokens,
        )

    async def SubscribeKvEvents(
        self, request: scheduler_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """See scheduler.proto."""
        await self._cell.kv_events.stream(context.write)


def _describe_tenant(tenant: TenantState) -> scheduler_pb2.TenantState:
    return scheduler_pb2.TenantState(
        name=tenant.name, num_waiting=tenant.num_waiting, num_in_flight=tenant.num_in_flight
    )


def _describe_rank(rank: RankState) -> scheduler_pb2.RankSteps:
    return scheduler_pb2.RankSteps(
        dp_rank=rank.rank,
        num_prefill_steps=rank.num_steps.prefill,
        num_decode_steps=rank.num_steps.decode,
        num_mixed_steps=rank.num_steps.mixed,
        num_dummy_steps=rank.num_steps.dummy,
        is_attached=rank.is_attached,
        is_draining=rank.is_draining,
        num_waiting=rank.num_waiting,
        num_running=rank.num_running,
        num_blocks=rank.num_blocks,
        num_used_blocks=rank.num_used_blocks,
        num_cached_blocks=rank.num_cached_blocks,
        num_free_blocks=rank.num_free_blocks,
        num_checkpoints=rank.num_checkpoints,
        num_used_checkpoints=rank.num_used_checkpoints,
    )


class SchedulerAdminServicer(scheduler_pb2_grpc.SchedulerAdminServiceServicer):
    """Serves operators; see scheduler.proto."""

    def __init__(self, cell: CellServer) -> None:
        self._cell = cell

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with `server`."""
        scheduler_pb2_grpc.add_SchedulerAdminServiceServicer_to_server(self, server)

    async def FlushPrefixCache(
        self, request: scheduler_pb2.FlushPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.FlushPrefixCacheResponse:
        """See scheduler.proto."""
        num_blocks = self._cell.flush_prefix_cache()
        logger.info("the prefix cache was flushed", extra={"num_blocks": num_blocks})
        return scheduler_pb2.FlushPrefixCacheResponse(num_blocks=num_blocks)

    async def Drain(
        self, request: scheduler_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.DrainResponse:
        """See scheduler.proto."""
        rank = _read_rank(request)
        self._cell.drain(rank)
        logger.info("draining", extra={"rank": rank})
        return scheduler_pb2.DrainResponse()

    async def Undrain(
        self, request: scheduler_pb2.UndrainRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.UndrainResponse:
        """See scheduler.proto."""
        rank = _read_rank(request)
        self._cell.undrain(rank)
        logger.info("no longer draining", extra={"rank": rank})
        return scheduler_pb2.UndrainResponse()


def _read_rank(request: scheduler_pb2.DrainRequest | scheduler_pb2.UndrainRequest) -> int:
    if not request.HasField("dp_rank"):
        raise InvalidRequestError.from_violations([Violation("dp_rank", "OUT_OF_RANGE", "must be set")])
    return request.dp_rank
