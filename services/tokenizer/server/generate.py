"""The course of one `Generate` call, and its log line."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from google.protobuf.message import Message

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.answer.answer import Choice, Extras, Generation
from services.tokenizer.answer.completion import Completion
from services.tokenizer.answer.logprobs import LogprobQueue
from services.tokenizer.answer.request_totals import CANCELLED, RequestTotals
from services.tokenizer.exchange.scheduler_client import SchedulerClient
from services.tokenizer.request.checks import CheckedRequest, check_request
from services.tokenizer.request.large_messages import checked
from services.tokenizer.request.model import ServedModel
from services.tokenizer.request.prepare import PreparedPrompt, RequestPreparer
from services.tokenizer.server.live_requests import LiveRequests
from services.tokenizer.tracing.request_trace import RequestTrace
from shared.errors import DeadlinePassedError, InternalError, ServiceError
from shared.ids import RequestHandle
from shared.network.statuses import StatusError, reason_of
from shared.network.turns import get_arrived_at
from shared.request.limits import ModelLimits, check_task
from shared.request.request_fields import check_exactness
from shared.request.sampling_params import NO_OPTIONS
from shared.step.columns import Float32Column
from shared.tenants.client_keys import ANY_CLIENT, Client

logger = logging.getLogger(__name__)

# At most 1 MiB of text, well below the 4 MiB that gRPC clients accept in a message by default.
_ECHO_CHARACTERS = 256 * 1024
# A client ends a call at its own deadline, before the server's has passed: gRPC rounds the time that it sends up, by at
# most 1 %. Source: `Timeout::FromMillis` in gRPC's core.
_MAX_ROUNDING = 0.01
_CLOCK_SLACK_S = 0.25


class Writer(Protocol):
    """Takes a call's responses, in order."""

    async def write(self, response: tokenizer_pb2.GenerateResponse) -> None:
        """Returns when there is room for another response."""


@dataclass(frozen=True, slots=True)
class CallTerms:
    """What a call brings besides its message."""

    time_left_s: float | None = None
    """None without a deadline."""
    default_max_tokens: int | None = None
    """What `max_tokens` is at most if neither the request nor the model sets it; None means what the message's
    definition says.
    """
    overrides_model: bool = False
    """Whether `default_max_tokens` counts although the model sets another: it is the client's wish."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Further fields of the log line; no text."""
    client: Client = ANY_CLIENT
    trace: RequestTrace | None = None
    """None unless the call is traced."""
    max_in_flight: int | None = None
    """How many prompts are in the cell at once, the first of them alone; None means all."""
    vectors: dict[int, Float32Column] | None = None
    """Where the prompts' vectors go, by index; None if completions are wanted."""


class Check(Protocol):
    """Checks a call's message."""

    def __call__(
        self,
        message: Any,
        /,
        *,
        model_name: str,
        limits: ModelLimits,
        defaults: common_pb2.SamplingParams,
        client: Client,
    ) -> CheckedRequest:
        """See `check_request`."""


class GenerateCall:
    """Serves one call; constructed when its turn has come."""

    def __init__(
        self,
        model: ServedModel,
        scheduler: SchedulerClient,
        live: LiveRequests,
        writer: Writer,
        *,
        totals: RequestTotals,
        terms: CallTerms,
    ) -> None:
        self._model = model
        self._scheduler = scheduler
        self._preparer = RequestPreparer(model, lambda: scheduler.cell().limits)
        self._live = live
        self._writer = writer
        self._totals = totals
        self._arrived_at = get_arrived_at()
        self._deadline_at = None if terms.time_left_s is None else time.monotonic() + terms.time_left_s
        # The fields of the log line: ids, counts and durations, never text.
        self._facts: dict[str, str | int | float] = dict(terms.facts)
        self._default_max_tokens = terms.default_max_tokens
        self._overrides_model = terms.overrides_model
        self._client = terms.client
        self._trace = terms.trace
        self._max_in_flight = terms.max_in_flight
        self._vectors = terms.vectors
        if self._trace is not None:
            self._facts["trace_id"] = self._trace.trace_id
        self._tenant_name = terms.client.tenant.name
        if terms.client is not ANY_CLIENT:
            self._facts["tenant"] = self._tenant_name

    async def serve(self, request: Message, check: Check = check_request) -> None:
        """Write all responses.

        Args:
            request: A `GenerateRequest`, or what else `check` reads.

        Raises:
            ServiceError: the request was refused, or its answer ended with an error.
        """
        finish, failure = None, None
        try:
            finish = await self._serve(request, check)
        except BaseException as error:
            failure = self._failure_reason(error)
            self._totals.count_failure(failure)
            if self._trace is not None:
                self._trace.failure = failure or InternalError.reason
            raise
        finally:
            total_ms = round(1e3 * (time.monotonic() - self._arrived_at), 3)
            logger.info("request ended", extra={**self._facts, "outcome": finish or failure, "total_ms": total_ms})

    async def _serve(self, message: Message, check: Check) -> str:
        """Returns the names of the finish reasons."""
        self._live.check_open()
        cell = self._scheduler.cell()
        named: Any = message
        # Another model is refused as such.
        if not named.HasField("model") or named.model == self._model.name:
            check_task(wants_vector=self._vectors is not None, embeds=cell.embeds)
        defaults = self._defaults(cell.default_sampling)
        work = partial(
            check,
            message,
            model_name=self._model.name,
            limits=cell.limits,
            defaults=defaults,
            client=self._client,
        )
        request = await checked(self._model.checking, message, work)
        # It may have taken a while.
        self._live.check_open()
        self._facts["request_id"] = request.request_id
        check_exactness(cell.exact_fingerprint, is_exact=request.is_exact)
        with self._live.admit(self._tenant_name, request.all_ids):
            prompts = await self._prepare(request)
            if self._deadline_at is not None and time.monotonic() >= self._deadline_at:
                raise DeadlinePassedError("the deadline passed before the request was submitted")
            return await self._stream(request, prompts)

    async def _prepare(self, request: CheckedRequest) -> list[PreparedPrompt]:
        trace = self._trace
        if trace is not None:
            tenant = None if self._client is ANY_CLIENT else self._tenant_name
            trace.begin_render(request.request_id, self._model.name, tenant)
        prompts = await self._preparer.prepare(request)
        if trace is not None:
            trace.end_render(prompts[0].request.sampling, request.n)
        return prompts

    def _defaults(self, of_model: common_pb2.SamplingParams) -> common_pb2.SamplingParams:
        if self._default_max_tokens is None:
            return of_model
        defaults = common_pb2.SamplingParams(max_tokens=self._default_max_tokens)
        defaults.MergeFrom(of_model)
        if self._overrides_model:
            defaults.max_tokens = self._default_max_tokens
        return defaults

    async def _stream(self, request: CheckedRequest, prompts: Sequence[PreparedPrompt]) -> str:
        generation = Generation(arrived_at=self._arrived_at, totals=self._totals)
        self._live.begin(self._tenant_name, request.request_id, generation)
        for index, prompt in enumerate(prompts):
            generation.choices += [
                self._make_choice(request, prompt, generation, (index, number)) for number in range(request.n)
            ]
        handles: list[RequestHandle] = []
        num_allowed = len(prompts) if self._max_in_flight is None else 1
        try:
            self._submit(prompts, generation, handles, num_allowed)
            for index, prompt in enumerate(prompts):
                await self._begin(index, prompt, is_empty=request.form.is_empty)
            async for response in generation.responses():
                await self._writer.write(response)
                if self._max_in_flight is not None and response.HasField("finish"):
                    # What the prompts share is cached from the first one's end on.
                    num_allowed += 1 if num_allowed > 1 else self._max_in_flight
                    self._submit(prompts, generation, handles, num_allowed)
        finally:
            for handle in handles:
                self._scheduler.requests.abort(handle)
            self._note(generation)
        reasons = sorted({common_pb2.FinishReason.Name(reason) for reason in generation.finish_reasons})
        return ",".join(reason.removeprefix("FINISH_REASON_") for reason in reasons)

    def _submit(
        self,
        prompts: Sequence[PreparedPrompt],
        generation: Generation,
        handles: list[RequestHandle],
        num_allowed: int,
    ) -> None:
        """Submit prompts until `num_allowed` of them are; `handles` are those to abort them by."""
        for index in range(len(handles), min(num_allowed, len(prompts))):
            request = prompts[index].request
            choices = generation.choices[index * request.n : (index + 1) * request.n]
            handle = self._scheduler.requests.submit(
                request, choices, arrived_at=self._arrived_at, deadline_at=self._deadline_at
            )
            handles.append(handle)

    def _make_choice(
        self, request: CheckedRequest, prompt: PreparedPrompt, generation: Generation, place: tuple[int, int]
    ) -> Choice:
        form, options = request.form, prompt.request.sampling.options or NO_OPTIONS
        parser = None if prompt.make_parser is None else prompt.make_parser()
        # A parser that needs to see special tokens leaves them out of the answer itself.
        skips = form.skips_special_tokens and not (parser is not None and parser.needs_special_tokens)
        completion = Completion(
            self._model.texts.detokenizer(prompt.request.prompt_ids, skips_special_tokens=skips),
            form.stop_strings,
            parser=parser,
            includes_stop=form.includes_stop,
            min_tokens=options.min_tokens,
        )
        extras = Extras(
            form.includes_stop,
            form.is_empty,
            None if form.is_empty else self._logprob_queue(options.num_top, len(options.logprob_token_ids)),
            self._logprob_queue(options.num_prompt_logprobs),
            None if self._trace is None else self._trace.add_choice(*place),
            self._vectors,
        )
        return Choice(
            generation, completion, place=place, num_prompt_tokens=len(prompt.request.prompt_ids), extras=extras
        )

    def _logprob_queue(self, num_top: int | None, num_requested: int = 0) -> LogprobQueue | None:
        if num_top is None:
            return None
        return LogprobQueue(1 + num_requested + num_top, self._model.texts.bytes_of)

    async def _begin(self, index: int, prompt: PreparedPrompt, *, is_empty: bool) -> None:
        """Write the `Accepted` message, and each choice's echo."""
        request = prompt.request
        accepted = tokenizer_pb2.Accepted(
            request_id=request.request_id,
            model=self._model.name,
            num_prompt_tokens=len(request.prompt_ids),
            max_tokens=0 if is_empty else request.sampling.max_tokens,
            seed=request.sampling.seed,
            not_enforced=prompt.not_enforced,
            unread_variables=prompt.unread_variables,
        )
        await self._writer.write(tokenizer_pb2.GenerateResponse(accepted=accepted, prompt=index))
        for choice in range(request.n):
            for text in echo_pieces(prompt.echo):
                await self._writer.write(tokenizer_pb2.GenerateResponse(text=text, prompt=index, choice=choice))

    def _note(self, generation: Generation) -> None:
        usage = generation.usage()
        if self._trace is not None:
            self._trace.end_answer(usage, generation)
        self._facts["num_prompt_tokens"] = usage.num_prompt_tokens
        self._facts["num_cached_tokens"] = usage.num_cached_tokens
        self._facts["num_completion_tokens"] = generation.num_tokens
        num_resumes = sum(choice.num_resumes for choice in generation.choices)
        if num_resumes:
            self._facts["num_resumes"] = num_resumes
            for choice in generation.choices:
                self._scheduler.requests.counters.add_resumes(choice.num_resumes, is_exact=choice.resumes_exactly)
        if generation.ttft_s is not None:
            self._facts["ttft_ms"] = round(1e3 * generation.ttft_s, 3)

    def _failure_reason(self, error: BaseException) -> str | None:
        if isinstance(error, StatusError):
            return reason_of(error.status)
        if isinstance(error, ServiceError):
            return error.reason
        if not isinstance(error, asyncio.CancelledError):
            return InternalError.reason
        return DeadlinePassedError.reason if self._is_deadline_near() else CANCELLED

    def _is_deadline_near(self) -> bool:
        """Whether a call that is cancelled now has reached its deadline: gRPC cancels at a deadline, too."""
        if self._deadline_at is None:
            return False
        slack_s = _CLOCK_SLACK_S + _MAX_ROUNDING * (self._deadline_at - self._arrived_at)
        return time.monotonic() >= self._deadline_at - slack_s


def echo_pieces(text: str) -> Iterator[str]:
    """Pieces that each fit a message; none for an empty text."""
    for start in range(0, len(text), _ECHO_CHARACTERS):
        yield text[start : start + _ECHO_CHARACTERS]
