"""The link to one group of workers: the only caller of WorkerService.

When to send what is decided in `attach` and `domain_client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import grpc
from google.rpc import error_details_pb2, status_pb2

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from services.scheduler.cell.domains.attach_events import (
    QUESTION,
    Accepted,
    AttachEvent,
    GroupPlace,
    Refused,
    StreamBroken,
    StreamOpened,
)
from services.scheduler.cell.domains.scheduler_claim import OFFER_TIMEOUT_S
from services.scheduler.cell.events import Event, RankHeartbeat, StepReturned
from services.scheduler.core.batch.step import Step
from services.scheduler.core.worker_facts import WorkerFacts
from shared.errors import NotReadyError
from shared.ids import DpRank
from shared.network.statuses import reason_of, status_from_rpc_error
from shared.step.codec import encode_step, parse_result
from shared.step.step import StepResult
from shared.wire import read_introduction

logger = logging.getLogger(__name__)

# For calls that a group answers at once.
ANSWER_TIMEOUT_S = 5.0

_Sent = worker_pb2.StepRequest | worker_pb2.Heartbeat


class _Outbox(asyncio.Queue[_Sent | None]):
    """What is to be sent on one stream; after None the scheduler's side is closed."""

    is_closing = False


class GroupLink:
    """The link to a group's leader: at most one stream, which sends steps in order.

    Results of offers and the state of the stream go to `on_attach_event`, messages from the stream to `on_event`.
    """

    def __init__(
        self,
        rank: DpRank,
        connect: Callable[[], grpc.aio.Channel],
        attach_request: worker_pb2.AttachRequest,
        *,
        on_attach_event: Callable[[AttachEvent], None],
        on_event: Callable[[Event], None],
    ) -> None:
        """`connect` opens a channel to the leader; `attach_request` is as in `DomainClient`."""
        self._rank = rank
        self._connect = connect
        self._attach_request = attach_request
        self._on_attach_event = on_attach_event
        self._on_event = on_event
        self._channel: grpc.aio.Channel | None = None
        # What is to be sent on the stream; None while there is none.
        self._outbox: _Outbox | None = None
        self._is_staying = False

    def send(self, step: Step) -> None:
        """Send a step of the stream's epoch; discarded when the stream is gone.

        It is encoded here, because in the sending task an exception would go unnoticed.
        """
        if self._outbox is not None:
            self._outbox.put_nowait(encode_step(step))

    def beat(self, progress: int, *, is_staying: bool) -> None:
        """Send a heartbeat on the stream, if any; the first one of the next stream says the same. See worker.proto."""
        self._is_staying = is_staying
        if self._outbox is not None:
            self._outbox.put_nowait(worker_pb2.Heartbeat(progress=progress, is_staying=is_staying))

    def end_stream(self) -> None:
        """End the stream, if any, with the word that no scheduler needs the group any more.

        The group then ends it too, and `run_stream` returns without an event; another stream may be opened meanwhile.
        """
        if self._outbox is not None:
            self._outbox.is_closing = True
            self._outbox.put_nowait(worker_pb2.Heartbeat(is_last=True))
            self._outbox.put_nowait(None)
            # The stream closes its connection itself.
            self._outbox = self._channel = None

    async def offer(self, epoch: int, *, is_first_start: bool = False) -> None:
        """Offer an epoch, or query the group with `QUESTION`; `is_first_start` is as in `AttachRequest`."""
        request = worker_pb2.AttachRequest()
        request.CopyFrom(self._attach_request)
        request.epoch, request.is_first_start = epoch, is_first_start
        try:
            timeout_s = ANSWER_TIMEOUT_S if epoch == QUESTION else OFFER_TIMEOUT_S
            response = await self._stub().Attach(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            await self._leave_dead_connection(error)
            status = status_from_rpc_error(error)
            reason = f"{reason_of(status) or error.code().name}: {error.details()}"
            is_ready = reason_of(status) != NotReadyError.reason
            self._on_attach_event(Refused(self._rank, epoch, reason, *_read_holder(status), is_ready=is_ready))
        else:
            self._on_attach_event(_read_acceptance(self._rank, epoch, response))

    async def restart(self, epoch: int) -> None:
        """Ask the leader to end the group's processes."""
        instance_id = self._attach_request.scheduler_instance_id
        request = worker_pb2.RestartRequest(epoch=epoch, scheduler_instance_id=instance_id)
        try:
            await self._stub().Restart(request, timeout=ANSWER_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            logger.info("the restart request failed", extra={"rank": self._rank, "error": _describe(error)})
            await self._leave_dead_connection(error)

    async def run_stream(self, epoch: int) -> None:
        """Serve the epoch's stream until it breaks; cancelling closes it."""
        channel = self._open_channel()
        call = worker_pb2_grpc.WorkerServiceStub(channel).Execute()
        outbox = self._outbox = _Outbox()
        sender = asyncio.create_task(self._send(call, epoch, outbox))
        broken = StreamBroken(self._rank, epoch)
        try:
            await self._receive(call, epoch, outbox)
            if not outbox.is_closing:
                logger.warning("the worker ended the step stream", extra={"rank": self._rank, "epoch": epoch})
        except (grpc.aio.AioRpcError, _ResultError, TimeoutError) as error:
            facts = {"rank": self._rank, "epoch": epoch, "error": _describe(error)}
            if not outbox.is_closing:
                logger.warning("the link to the worker broke", extra=facts)
            if isinstance(error, grpc.aio.AioRpcError):
                broken = StreamBroken(self._rank, epoch, *_read_holder(status_from_rpc_error(error)))
        finally:
            sender.cancel()
            call.cancel()
            if self._outbox is outbox:
                self._outbox = None
            # The connection may be dead, so it is not used again.
            if self._channel is channel:
                self._channel = None
            await channel.close()
        if not outbox.is_closing:
            self._on_attach_event(broken)

    async def close(self) -> None:
        """Close the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _open_channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = self._connect()
        return self._channel

    def _stub(self) -> worker_pb2_grpc.WorkerServiceStub:
        return worker_pb2_grpc.WorkerServiceStub(self._open_channel())

    async def _receive(self, call: grpc.aio.StreamStreamCall, epoch: int, outbox: _Outbox) -> None:
        messages = aiter(call)
        # A leader that accepts the stream sends a heartbeat at once. Headers prove less: a refusal may have some too.
        async with asyncio.timeout(OFFER_TIMEOUT_S):
            if await anext(messages, None) is None:
                return
        self._on_attach_event(StreamOpened(self._rank, epoch))
        is_leaving = False
        async for message in messages:
            if outbox.is_closing:
                # The epoch has ended here.
                continue
            if message.step_id:
                self._on_event(StepReturned(self._rank, _read_result(message)))
                continue
            beat = message.heartbeat
            if beat.is_leaving and not is_leaving:
                is_leaving = True
                logger.info("the workers were asked to end", extra={"rank": self._rank, "epoch": epoch})
            self._on_event(RankHeartbeat(self._rank, epoch, beat.progress, beat.is_leaving))

    async def _send(self, call: grpc.aio.StreamStreamCall, epoch: int, outbox: _Outbox) -> None:
        instance_id = self._attach_request.scheduler_instance_id
        # The first message identifies the scheduler that opened the stream.
        sent: _Sent | None = worker_pb2.Heartbeat(is_staying=self._is_staying)
        while sent is not None:
            message = sent
            if isinstance(sent, worker_pb2.Heartbeat):
                message = worker_pb2.StepRequest(epoch=epoch, scheduler_instance_id=instance_id, heartbeat=sent)
            try:
                await call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                # The receiving task sees the same end and reports why.
                return
            sent = await outbox.get()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.done_writing()

    async def _leave_dead_connection(self, error: grpc.aio.AioRpcError) -> None:
        """After no answer at all: another channel has the certificates of the day, and no state of this one."""
        if reason_of(status_from_rpc_error(error)) is None:
            await self.close()


class _ResultError(Exception):
    """A malformed result of a worker."""


def _read_result(message: worker_pb2.StepResult) -> StepResult:
    """Parse a result received from a worker.

    Raises:
        _ResultError: it is malformed. Any other `ValueError` on the path is our bug.
    """
    try:
        return parse_result(message)
    except ValueError as error:
        raise _ResultError(str(error)) from error


def _read_acceptance(rank: DpRank, epoch: int, response: worker_pb2.AttachResponse) -> Accepted:
    facts = WorkerFacts(
        epoch,
        response.model_digest,
        response.context_length,
        response.logits_width,
        tuple(response.eos_token_ids),
        response.num_blocks,
        response.num_draft_tokens,
        response.needs_all_tokens,
        response.default_sampling.SerializeToString(),
        response.numerics_fingerprint,
        response.is_exact,
        response.proposed_prompt_tokens,
        response.proposes_mixed_steps,
        tuple(response.graph_batch_sizes),
        response.weights_digest,
        read_introduction(response.introduction),
        response.state_bytes_per_slot,
        response.num_checkpoint_slots,
        response.max_num_seqs or None,
        response.start_time.ToMilliseconds() / 1e3 if response.HasField("start_time") else None,
        response.implementation,
        response.task == "embed",
    )
    layout = response.layout
    is_coupled = layout.has_expert_parallel and layout.dp_size > 1
    return Accepted(
        rank,
        epoch,
        facts,
        GroupPlace(
            DpRank(layout.dp_rank) if layout.HasField("dp_rank") else None, layout.dp_size, layout.tp_size, is_coupled
        ),
        (response.last_step_epoch, response.last_step_id),
        response.is_stuck,
    )


def _read_holder(status: status_pb2.Status) -> tuple[int | None, str]:
    """A group's epoch (None when it did not answer) and live holder, from its refusal."""
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info):
            epoch = info.metadata.get("epoch", "")
            return int(epoch) if epoch.isdecimal() else 0, info.metadata.get("holder", "")
    return None, ""


def _describe(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
