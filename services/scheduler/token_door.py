"""The door for clients that tokenize themselves: `SchedulerService.Generate` and `Abort`.

To the engine all direct calls together are one client, whose handles are the calls: however many there are, a step
is told to one client more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from lockstep.v1 import scheduler_pb2
from services.scheduler.batch import Outputs
from services.scheduler.events import AbortRequest, ClientMessage, Event, Submission
from services.scheduler.exchange_codec import PRIORITIES
from services.scheduler.token_stream import Response, TokenStream
from shared.errors import NotReadyError, ServiceError, Violation
from shared.limits import TOKEN_DTYPE, ModelLimits
from shared.request_fields import (
    raise_violations,
    read_cache_salt,
    read_output_token_ids,
    read_priority,
    read_prompt_token_ids,
    read_request_id,
    read_sampling,
    resolve_max_tokens,
)

logger = logging.getLogger(__name__)

# The engine's number for all direct calls; replicas count from 1.
DOOR_CLIENT = 0

# A response costs about 50 µs. The results of steps are let in between so many, at most half a millisecond late.
RESPONSES_PER_TURN = 8


class TokenDoor:
    """Brings direct calls to the engine and its outputs back to them.

    Invariant: a call's stream is here from its submission until its end or its abort, as the engine's request is. A
    stream that has news is in `_to_wake`, or awake and about to send them; while `_to_wake` holds any, a turn is due.
    """

    def __init__(self, model_limits: Callable[[], ModelLimits | None], on_event: Callable[[Event], None]) -> None:
        """Open the door in the running event loop.

        Args:
            model_limits: Tells what requests are held to; None while no worker is attached.
            on_event: Hands an event to the engine; by its return, what the engine says has been done.
        """
        self._model_limits = model_limits
        self._on_event = on_event
        self._handles = itertools.count(1)
        self._streams: dict[int, TokenStream] = {}
        self._to_wake: deque[TokenStream] = deque()
        self._loop = asyncio.get_running_loop()

    async def generate(
        self,
        request: scheduler_pb2.SchedulerServiceGenerateRequest,
        write: Callable[[Response], Awaitable[None]],
        *,
        time_left_s: float | None = None,
    ) -> None:
        """Serve one call, whose client waits `time_left_s`, or for ever; when it is cancelled, so is its request.

        Raises:
            ServiceError: the request is refused, or its answer ended with an error.
        """
        arrived_s = self._loop.time()
        limits = self._model_limits()
        if limits is None:
            raise NotReadyError("no worker has been attached yet")
        submission = resolve_request(next(self._handles), request, limits, time_left_s=time_left_s)
        stream = self._submit(submission)
        outcome = "INTERNAL"
        try:
            outcome = await _answer(submission, stream, write)
        except ServiceError as error:
            outcome = error.reason
            raise
        except asyncio.CancelledError:
            outcome = "CANCELLED"
            raise
        finally:
            self._forget(submission.handle)
            self._log_end(submission.request_id, stream, outcome, arrived_s)

    def abort(self, request: scheduler_pb2.AbortRequest) -> None:
        """End a request, whichever client's; nothing happens when none has the id.

        Raises:
            InvalidRequestError: this can be nobody's id.
        """
        violations: list[Violation] = []
        request_id = read_request_id(request.request_id, violations)
        raise_violations(violations)
        logger.info("abort", extra={"request_id": request_id})
        self._on_event(AbortRequest(request_id))

    def deliver(self, outputs: Outputs) -> None:
        """Hand out what the engine told the door; the calls send it in turns of their own."""
        is_turn_due = bool(self._to_wake)
        for start in outputs.starts:
            self._streams[start.handle].usage.num_cached_tokens = start.num_cached_tokens
        for handle, token_id in zip(outputs.handles.tolist(), outputs.token_ids.tolist(), strict=True):
            self._with_news(self._streams[handle]).push(token_id)
        for end in outputs.ends:
            self._with_news(self._streams.pop(end.handle)).end = end
        if self._to_wake and not is_turn_due:
            self._loop.call_soon(self._wake_some)

    def _submit(self, submission: Submission) -> TokenStream:
        if submission.attempt > 1:
            # The call that had the request, if it still lives, must not wait for tokens that go elsewhere.
            self._on_event(AbortRequest(submission.request_id))
        num_prompt_tokens = len(submission.prompt) // TOKEN_DTYPE.itemsize
        stream = TokenStream(num_prompt_tokens, len(submission.output) // TOKEN_DTYPE.itemsize)
        self._streams[submission.handle] = stream
        self._on_event(ClientMessage(DOOR_CLIENT, [submission]))
        return stream

    def _forget(self, handle: int) -> None:
        """Abort a request that has not ended."""
        if self._streams.pop(handle, None) is not None:
            self._on_event(ClientMessage(DOOR_CLIENT, aborts=[handle]))

    def _with_news(self, stream: TokenStream) -> TokenStream:
        """The stream, which is about to get news; one that has some is waiting to be woken, or awake."""
        if not stream.has_news:
            self._to_wake.append(stream)
        return stream

    def _wake_some(self) -> None:
        for _ in range(min(RESPONSES_PER_TURN, len(self._to_wake))):
            self._to_wake.popleft().wake()
        if self._to_wake:
            self._loop.call_soon(self._wake_some)

    def _log_end(self, request_id: str, stream: TokenStream, outcome: str, arrived_s: float) -> None:
        facts = {
            "request_id": request_id,
            "num_prompt_tokens": stream.usage.num_prompt_tokens,
            "num_cached_tokens": stream.usage.num_cached_tokens,
            "num_completion_tokens": stream.num_tokens,
            "outcome": outcome,
            "total_ms": round(1e3 * (self._loop.time() - arrived_s), 3),
        }
        logger.info("request ended", extra=facts)


def resolve_request(
    handle: int,
    request: scheduler_pb2.SchedulerServiceGenerateRequest,
    limits: ModelLimits,
    *,
    time_left_s: float | None = None,
) -> Submission:
    """Check every field, and resolve what the request left open.

    One that brings the output of an earlier call is a second attempt, however many there were: what is still in
    flight of them is aborted before it is submitted.

    Raises:
        InvalidRequestError: naming the first bad fields.
        PromptTooLongError, ContextExceededError, KvCapacityExceededError: it does not fit.
    """
    violations: list[Violation] = []
    request_id = read_request_id(request.request_id if request.HasField("request_id") else None, violations)
    prompt = read_prompt_token_ids(request.prompt_token_ids, limits, violations, field="prompt_token_ids")
    sampling = read_sampling(request.sampling, limits, violations)
    priority = read_priority(request.priority, violations)
    cache_salt = read_cache_salt(request.cache_salt, violations)
    output = read_output_token_ids(request.output_token_ids, request.sampling, limits, violations)
    raise_violations(violations)
    params = resolve_max_tokens(sampling, prompt.size, limits, has_max_tokens=request.sampling.HasField("max_tokens"))
    return Submission(
        handle,
        request_id,
        prompt.astype(TOKEN_DTYPE).tobytes(),
        params,
        priority=PRIORITIES[priority],
        cache_salt=cache_salt,
        attempt=2 if output.size else 1,
        output=output.astype(TOKEN_DTYPE).tobytes(),
        time_left_s=time_left_s,
    )


async def _answer(submission: Submission, stream: TokenStream, write: Callable[[Response], Awaitable[None]]) -> str:
    """Write the whole answer; returns the finish reason's name."""
    if stream.end is not None and stream.end.error is not None:
        # The engine refused it at once: it was never accepted.
        raise stream.end.error
    accepted = Response.Accepted(
        request_id=submission.request_id,
        num_prompt_tokens=stream.usage.num_prompt_tokens,
        max_tokens=submission.params.max_tokens,
        seed=submission.params.seed,
    )
    await write(Response(accepted=accepted))
    async for response in stream.responses():
        await write(response)
    assert stream.end is not None
    assert stream.end.finish is not None
    return stream.end.finish.reason.name
