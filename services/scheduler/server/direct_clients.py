"""Serves clients that tokenize themselves.

To the engine, all direct calls are a single client whose handles are the calls' choices, so a step delivers to at most
one more client.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

import numpy as np

from lockstep.v1 import common_pb2, scheduler_pb2
from services.scheduler.cell.events import AbortRequest, ChoiceSoFar, ClientMessage, Event, Submission
from services.scheduler.core.results.outputs import Outputs, RequestEnd
from services.scheduler.server.exchange_codec import PRIORITIES
from services.scheduler.server.token_stream import ChoiceStream, Response, TokenStream
from shared.errors import ModelChangedError, NotReadyError, ServiceError, Violation
from shared.ids import RequestHandle, choice_handles
from shared.request.limits import MAX_CHOICES, TOKEN_DTYPE, ModelLimits
from shared.request.request_fields import (
    raise_violations,
    read_cache_salt,
    read_choices_so_far,
    read_determinism,
    read_num_choices,
    read_priority,
    read_prompt_token_ids,
    read_request_id,
    read_sampling,
    resolve_max_tokens,
)
from shared.request.sampling_codec import encode_options
from shared.tenants.client_keys import ANY_CLIENT, Client
from shared.wire import find_needs

logger = logging.getLogger(__name__)

# The engine's client number for all direct calls; replicas count from 1.
DIRECT_CLIENT = 0

# A response costs about 50 µs. After this many, step results get their turn, at most half a millisecond late.
RESPONSES_PER_TURN = 8

# A scheduler that has just started holds workers by then, unless it is a standby.
_STANDBY_RETRY_S = 1.0

_MAX_FIRST_HANDLE = 2**32 - MAX_CHOICES


class DirectClients:
    """Passes direct calls to the engine, and its outputs back to them.

    Invariant: a choice is here from its submission until its end or its abort, as in the engine. A stream with news is
    in `_to_wake`, or awake and about to send it; while `_to_wake` is not empty, a turn is scheduled.
    """

    def __init__(
        self,
        model_limits: Callable[[], ModelLimits | None],
        on_event: Callable[[Event], None],
        default_sampling: Callable[[], common_pb2.SamplingParams] = common_pb2.SamplingParams,
        *,
        weights_digest: Callable[[], str] = str,
    ) -> None:
        """Begin to accept calls in the running event loop.

        Args:
            model_limits: Returns None while no worker has been attached.
            on_event: When it returns, the engine's actions have been carried out.
            weights_digest: Returns an empty one while no worker has reported it.
        """
        self._model_limits = model_limits
        self._default_sampling = default_sampling
        self._weights_digest = weights_digest
        self._on_event = on_event
        # The error for new calls, once closed.
        self._end: ServiceError | None = None
        self._next_handle = RequestHandle(1)
        self._choices: dict[RequestHandle, ChoiceStream] = {}
        self._to_wake: deque[TokenStream] = deque()
        self._loop = asyncio.get_running_loop()

    @property
    def is_idle(self) -> bool:
        """Whether no call is in progress."""
        return not self._choices

    async def generate(
        self,
        request: scheduler_pb2.SchedulerServiceGenerateRequest,
        write: Callable[[Response], Awaitable[None]],
        *,
        time_left_s: float | None = None,
        client: Client = ANY_CLIENT,
    ) -> None:
        """Serve one call; cancelling it aborts its request.

        Raises:
            ServiceError: the request is refused, or its answer ended with an error.
        """
        arrived_at = self._loop.time()
        if self._end is not None:
            raise self._end
        limits = self._model_limits()
        if limits is None:
            raise NotReadyError(
                "this scheduler has held no workers yet: it may be a standby", retry_delay_s=_STANDBY_RETRY_S
            )
        digest = self._weights_digest()
        if request.weights_digest not in ("", digest):
            raise ModelChangedError("the cell serves other weights than the request names", weights_digest=digest)
        submission = resolve_request(
            self._next_handle,
            request,
            limits,
            defaults=self._default_sampling(),
            time_left_s=time_left_s,
            client=client,
        )
        # Handles wrap around when they run out; by then the calls that had the first ones are over.
        self._next_handle = RequestHandle((self._next_handle + submission.n) % _MAX_FIRST_HANDLE)
        stream = self._submit(submission)
        outcome = "INTERNAL"
        try:
            outcome = await _answer(submission, stream, write, digest)
        except ServiceError as error:
            outcome = error.reason
            raise
        except asyncio.CancelledError:
            outcome = "CANCELLED"
            raise
        finally:
            self._forget(submission)
            tenant = {} if client is ANY_CLIENT else {"tenant": client.tenant.name}
            self._log_end({"request_id": submission.request_id, **tenant}, stream, outcome, arrived_at)

    def abort(self, request: scheduler_pb2.AbortRequest, client: Client = ANY_CLIENT) -> None:
        """End a request of the client's tenant; an unknown id, and another tenant's, is ignored.

        Raises:
            InvalidRequestError: the id is malformed.
        """
        violations: list[Violation] = []
        request_id = read_request_id(request.request_id, violations)
        raise_violations(violations)
        logger.info("abort", extra={"request_id": request_id})
        self._on_event(AbortRequest(request_id, client.tenant.name))

    def close(self, error: ServiceError) -> None:
        """End every call with an error, after its tokens; later calls get it at once."""
        self._end = error
        self.deliver(Outputs.only_ends([RequestEnd(handle, error=error) for handle in self._choices]))

    def deliver(self, outputs: Outputs) -> None:
        """Distribute outputs to the calls, which send them in later turns of the event loop.

        Those for a call that has just ended are dropped: its abort is on its way to the engine.
        """
        is_turn_due = bool(self._to_wake)
        for start in outputs.starts:
            if start.handle in self._choices:
                self._choices[start.handle].usage.num_cached_tokens = start.num_cached_tokens
        for handle, prompt_logprobs in outputs.prompt_logprobs:
            if handle in self._choices:
                self._with_news(self._choices[handle]).call.prompt_logprobs.append(prompt_logprobs)
        self._deliver_tokens(outputs)
        for end in outputs.ends:
            if end.handle in self._choices:
                self._with_news(self._choices.pop(end.handle)).end = end
        if self._to_wake and not is_turn_due:
            self._loop.call_soon(self._wake_some)

    def _deliver_tokens(self, outputs: Outputs) -> None:
        choices = self._choices
        rows = outputs.handles if outputs.counts is None else np.repeat(outputs.handles, outputs.counts)
        handles = cast("list[RequestHandle]", rows.tolist())
        for handle, token_id in zip(handles, outputs.token_ids.tolist(), strict=True):
            if handle in choices:
                self._with_news(choices[handle]).token_ids.append(token_id)
        if outputs.logprobs is not None:
            for position in outputs.logprobs.positions():
                if handles[position.index] in choices:
                    choices[handles[position.index]].logprobs.append(position)

    def _submit(self, submission: Submission) -> TokenStream:
        num_tokens = [len(so_far.output) // TOKEN_DTYPE.itemsize for so_far in submission.choices_so_far]
        stream = TokenStream(
            len(submission.prompt) // TOKEN_DTYPE.itemsize, num_tokens or [0] * submission.n, submission.open_choices
        )
        self._choices.update((submission.handle_of(choice.choice), choice) for choice in stream.choices)
        self._on_event(ClientMessage(DIRECT_CLIENT, [submission]))
        return stream

    def _forget(self, submission: Submission) -> None:
        """Abort the request unless all its choices have ended."""
        handles = choice_handles(submission.handle, submission.n)
        unfinished = [self._choices.pop(handle) for handle in handles if handle in self._choices]
        if unfinished:
            self._on_event(ClientMessage(DIRECT_CLIENT, aborts=[submission.handle]))

    def _with_news(self, choice: ChoiceStream) -> ChoiceStream:
        if not choice.call.has_news:
            choice.call.has_news = True
            self._to_wake.append(choice.call)
        return choice

    def _wake_some(self) -> None:
        num_responses = 0
        while self._to_wake and num_responses < RESPONSES_PER_TURN:
            stream = self._to_wake.popleft()
            stream.wake()
            num_responses += len(stream.choices)
        if self._to_wake:
            self._loop.call_soon(self._wake_some)

    def _log_end(self, names: Mapping[str, str], stream: TokenStream, outcome: str, arrived_at: float) -> None:
        usage = stream.usage
        facts = {
            **names,
            "num_prompt_tokens": usage.num_prompt_tokens,
            "num_cached_tokens": usage.num_cached_tokens,
            "num_completion_tokens": usage.num_completion_tokens,
            "outcome": outcome,
            "total_ms": round(1e3 * (self._loop.time() - arrived_at), 3),
        }
        logger.info("request ended", extra=facts)


def resolve_request(
    handle: RequestHandle,
    request: scheduler_pb2.SchedulerServiceGenerateRequest,
    limits: ModelLimits,
    *,
    defaults: common_pb2.SamplingParams | None = None,
    time_left_s: float | None = None,
    client: Client = ANY_CLIENT,
) -> Submission:
    """Check every field, and resolve what the request leaves open.

    A request with output from earlier calls is attempt 2, however many there were: when accepted, it replaces what is
    still in flight of them. Otherwise it would go before others, and its prompt would be free, on its client's word; so
    it waits and pays as a new one.

    Args:
        handle: That of its first choice.
        defaults: The model's own sampling parameters, if any.
        time_left_s: Until its deadline; None without one.
        client: Whose request it is.

    Raises:
        PermissionDeniedError: it has a higher priority than its client may ask for.
        InvalidRequestError: naming the first bad fields.
        PromptTooLongError, ContextExceededError, KvCapacityExceededError: it does not fit.
    """
    asked_priority = client.resolve_priority(request.priority)
    violations: list[Violation] = []
    request_id = read_request_id(request.request_id if request.HasField("request_id") else None, violations)
    prompt = read_prompt_token_ids(request.prompt_token_ids, limits, violations, field="prompt_token_ids")
    sampling = read_sampling(request.sampling, limits, violations, defaults=defaults)
    n = read_num_choices(request.sampling, violations)
    client.check_num_choices(n, 1, violations)
    priority = read_priority(asked_priority, violations)
    cache_salt = read_cache_salt(request.cache_salt, violations)
    is_exact = read_determinism(request.determinism, violations)
    outputs = read_choices_so_far(request.choices_so_far, request.sampling, limits, violations)
    raise_violations(violations)
    params = resolve_max_tokens(sampling, prompt.size, limits, has_max_tokens=request.sampling.HasField("max_tokens"))
    choices_so_far = tuple(
        ChoiceSoFar(output.astype(TOKEN_DTYPE).tobytes(), choice.is_finished)
        for output, choice in zip(outputs, request.choices_so_far, strict=True)
    )
    return Submission(
        handle,
        request_id,
        prompt.astype(TOKEN_DTYPE).tobytes(),
        params,
        priority=PRIORITIES[priority],
        cache_salt=cache_salt,
        attempt=2 if any(so_far != ChoiceSoFar() for so_far in choices_so_far) else 1,
        waits_as_new=True,
        n=n,
        choices_so_far=choices_so_far,
        time_left_s=time_left_s,
        is_exact=is_exact,
        tenant=client.tenant,
        needs=frozenset() if params.options is None else find_needs(encode_options(params.options)),
    )


async def _answer(
    submission: Submission, stream: TokenStream, write: Callable[[Response], Awaitable[None]], weights_digest: str
) -> str:
    """Returns the finish reasons."""
    if stream.refusal is not None:
        # It was never accepted.
        raise stream.refusal
    accepted = Response.Accepted(
        request_id=submission.request_id,
        num_prompt_tokens=stream.usage.num_prompt_tokens,
        max_tokens=submission.params.max_tokens,
        seed=submission.params.seed,
        weights_digest=weights_digest,
    )
    await write(Response(accepted=accepted))
    async for response in stream.responses():
        await write(response)
    ends = [choice.end for choice in stream.choices]
    return ",".join(end.finish.reason.name for end in ends if end is not None and end.finish is not None)
