"""What is noted of one traced request, from its arrival to its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep.v1 import common_pb2
from services.tokenizer.tracing.choice_times import DECODE, PREFILL, ChoiceTimes, Phase
from shared.errors import InternalError
from shared.request.sampling_params import SamplingParams

CHAT = "chat"
TEXT_COMPLETION = "text_completion"
RENDER = "render"

CANCELLED = "CANCELLED"
"""The failure that is the client's wish."""

Value = str | int | float | tuple[str, ...]
GetHeader = Callable[[str], Sequence[str]]
"""Returns all values of a header, whose name is in lower case."""


@dataclass(slots=True)
class SpanTotals:
    """What has become of spans since the service started."""

    num_exported: int = 0
    num_refused: int = 0
    """Spans that the collector did not take in time."""
    num_overflowed: int = 0
    """Spans for which there was no room in the queue."""

    @property
    def num_lost(self) -> int:
        """Spans that no collector has."""
        return self.num_refused + self.num_overflowed


class TracedAnswer(Protocol):
    """What is told of an answer."""

    @property
    def finish_reasons(self) -> list[common_pb2.FinishReason]:
        """The reasons for which its choices ended."""

    @property
    def num_tokens(self) -> int:
        """Its completion tokens."""

    @property
    def num_resumes(self) -> int:
        """Resumes of all choices."""

    @property
    def ttft_s(self) -> float | None:
        """Seconds from its call's arrival to the first token sent; None if there is none."""


@dataclass(slots=True)
class TracedChoice:
    """One choice, by its prompt's index in the request and its own in the prompt."""

    prompt: int
    choice: int
    times: ChoiceTimes = field(default_factory=ChoiceTimes)


class RequestTrace:
    """Collects what the spans of a request say; its text is not among it.

    Names of attributes are those of OpenTelemetry's semantic conventions for generative AI ("Spans"), and vLLM's for
    latencies (`SpanAttributes` in vllm/tracing).
    """

    def __init__(self, span: Any, trace_id: str) -> None:
        """The request has just arrived; `span` is what the tracer knows it by."""
        self.span = span
        self.trace_id = trace_id
        self.arrived_at = time.monotonic()
        self.attributes: dict[str, Value] = {}
        self.choices: list[TracedChoice] = []
        self.failure: str | None = None
        """The reason of the error that ended it."""
        self._render_began_at: float | None = None
        self._render_ended_at: float | None = None
        self._ttft_s: float | None = None

    def note_model(self, asked: str, answering: str) -> None:
        """The model's names in the request, which must be one that is served, and in the answer."""
        self.attributes |= {"gen_ai.request.model": asked, "gen_ai.response.model": answering}

    def begin_render(self, request_id: str, model_name: str, tenant: str | None) -> None:
        """The request is accepted, and its prompts are about to be rendered and encoded."""
        self._render_began_at = time.monotonic()
        self.attributes["gen_ai.request.id"] = request_id
        if "gen_ai.request.model" not in self.attributes:
            self.note_model(model_name, model_name)
        if tenant is not None:
            self.attributes["lockstep.tenant"] = tenant

    def end_render(self, sampling: SamplingParams, n: int) -> None:
        """The prompts are ready, with all parameters resolved."""
        self._render_ended_at = time.monotonic()
        self.attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
        self.attributes["gen_ai.request.temperature"] = sampling.temperature
        self.attributes["gen_ai.request.top_p"] = sampling.top_p
        if sampling.top_k:
            self.attributes["gen_ai.request.top_k"] = sampling.top_k
        if n > 1:
            self.attributes["gen_ai.request.choice.count"] = n

    def add_choice(self, prompt: int, choice: int) -> ChoiceTimes:
        """Trace one more choice."""
        traced = TracedChoice(prompt, choice)
        self.choices.append(traced)
        return traced.times

    def end_answer(self, usage: common_pb2.Usage, answer: TracedAnswer) -> None:
        """The answer has ended, maybe before all choices have finished."""
        now = time.monotonic()
        self._ttft_s = answer.ttft_s
        for choice in self.choices:
            choice.times.close(now)
        self.attributes["gen_ai.usage.input_tokens"] = usage.num_prompt_tokens
        self.attributes["gen_ai.usage.output_tokens"] = answer.num_tokens
        self.attributes["gen_ai.usage.cache_read.input_tokens"] = usage.num_cached_tokens
        if usage.num_reasoning_tokens:
            self.attributes["gen_ai.usage.reasoning.output_tokens"] = usage.num_reasoning_tokens
        self.attributes["gen_ai.response.finish_reasons"] = tuple(map(_finish_name, answer.finish_reasons))
        if answer.num_resumes:
            self.attributes["lockstep.num_resumes"] = answer.num_resumes

    def end(self, now: float) -> None:
        """The request has ended; the attributes and phases are complete."""
        latencies = {
            "time_to_first_token": self._ttft_s,
            "e2e": now - self.arrived_at,
            "time_in_queue": max((each.times.queue_s or 0.0 for each in self.choices), default=None),
            "time_in_model_prefill": max((each.times.duration_s(PREFILL) for each in self.choices), default=None),
            "time_in_model_decode": max((each.times.duration_s(DECODE) for each in self.choices), default=None),
        }
        for name, duration_s in latencies.items():
            if duration_s is not None:
                self.attributes[f"gen_ai.latency.{name}"] = duration_s
        if self.failure is not None:
            self.attributes["error.type"] = self.failure

    def phases(self, now: float) -> Iterator[tuple[Phase, dict[str, Value]]]:
        """Yield the phases of a request that has ended by `now`, with their attributes."""
        if self._render_began_at is not None:
            yield Phase(RENDER, self._render_began_at, self._render_ended_at or now), {}
        for choice in self.choices:
            attributes: dict[str, Value] = {}
            if len(self.choices) > 1:
                attributes = {"lockstep.prompt": choice.prompt, "lockstep.choice": choice.choice}
            for phase in choice.times.phases:
                yield phase, attributes


class Tracer(Protocol):
    """Makes the spans of requests."""

    def try_begin(self, operation: str, get_header: GetHeader) -> RequestTrace | None:
        """Begin the trace of a request that has just arrived; None if it is not sampled."""

    def end(self, trace: RequestTrace) -> None:
        """Export the spans of a request that has just ended. Never waits."""


@contextmanager
def traced(tracer: Tracer | None, operation: str, get_header: GetHeader) -> Iterator[RequestTrace | None]:
    """Trace the request that is served inside the `with` block; yields None if it is not traced."""
    trace = None if tracer is None else tracer.try_begin(operation, get_header)
    if tracer is None or trace is None:
        yield None
        return
    try:
        yield trace
    except BaseException as error:
        if trace.failure is None:
            trace.failure = CANCELLED if isinstance(error, asyncio.CancelledError) else InternalError.reason
        raise
    finally:
        tracer.end(trace)


def _finish_name(reason: common_pb2.FinishReason) -> str:
    """OpenAI's name, or vLLM's for a choice that did not finish."""
    if reason == common_pb2.FINISH_REASON_UNSPECIFIED:
        return "abort"
    return "length" if reason == common_pb2.FINISH_REASON_MAX_TOKENS else "stop"
