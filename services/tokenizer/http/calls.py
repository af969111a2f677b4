"""Serves one request by the call that serves it over gRPC, too."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.backend import Backend
from services.tokenizer.http.connections.clients import CLIENT
from services.tokenizer.http.errors import any_error
from services.tokenizer.http.fields.api_request import ApiRequest
from services.tokenizer.http.fields.fields import ignored_header
from services.tokenizer.http.openai.whole_answers import AnswerObject
from services.tokenizer.http.streams.answer_facts import AnswerFacts, PromptFacts
from services.tokenizer.http.streams.event_stream import COMMENT, EventStream
from services.tokenizer.http.streams.pieces import AnswerEvents
from services.tokenizer.server.generate import CallTerms, GenerateCall, Writer
from services.tokenizer.tracing.request_trace import CHAT, RequestTrace
from shared.errors import ClientTooSlowError, DeadlinePassedError, ServiceError
from shared.request.request_fields import read_time_left

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What tells the answers of the routes that continue prompts apart."""

    id_prefix: str
    make_events: Callable[[AnswerFacts], AnswerEvents]
    make_answer: Callable[[AnswerFacts], AnswerObject]
    sign_of_life: bytes = COMMENT
    """What a stream has after a silence."""
    operation: str = CHAT
    """What traces call it."""


class ApiCall:
    """Serves one request."""

    def __init__(
        self,
        backend: Backend,
        form: AnswerForm,
        http: web.Request,
        api: ApiRequest,
        *,
        facts: dict[str, str],
        trace: RequestTrace | None,
    ) -> None:
        """`facts` are further fields of the log line; `trace` is None unless the request is traced."""
        self._backend = backend
        self._form = form
        self._http = http
        self._api = api
        self._log_facts = facts
        self._trace = trace

    async def serve(self) -> web.StreamResponse:
        """Answer.

        Raises:
            ServiceError: the request was refused, or ended with an error before its answer began.
        """
        try:
            facts = await self._make_facts()
        except ServiceError as error:
            self._backend.totals.count_failure(error.reason)
            if self._trace is not None:
                self._trace.failure = error.reason
            raise
        return await (self._stream(facts) if self._api.options.is_streamed else self._answer_whole(facts))

    async def _make_facts(self) -> AnswerFacts:
        api, backend = self._api, self._backend
        cell = backend.cell()
        backend.check_model(api.model)
        if self._trace is not None:
            self._trace.note_model(api.model or backend.model_names[0], backend.model_names[0])
        sampling = api.message.sampling
        return AnswerFacts(
            f"{self._form.id_prefix}{api.message.request_id}",
            int(time.time()),
            backend.model_names[0],
            _system_fingerprint(backend.model.digest, cell.exact_fingerprint),
            api.options,
            sampling.seed,
            sampling.n if sampling.HasField("n") else 1,
            prompts=await self._prompt_facts(),
        )

    async def _prompt_facts(self) -> list[PromptFacts]:
        api = self._api
        if not (api.options.has_token_ids or api.options.has_prompt_in_logprobs):
            return []
        kept = api.message.truncate_prompt_tokens
        return [await self._backend.prompt_facts(prompt, kept) for prompt in api.prompts]

    async def _answer_whole(self, facts: AnswerFacts) -> web.Response:
        answer = self._form.make_answer(facts)
        await self._generate(answer)
        body = msgspec.json.encode(answer.value())
        return web.Response(body=body, content_type=JSON, headers=self._ignored(facts))

    async def _stream(self, facts: AnswerFacts) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        response.headers["Cache-Control"] = "no-cache, no-transform"
        response.headers["X-Accel-Buffering"] = "no"
        events = self._form.make_events(facts)
        with EventStream(self._http, response, self._backend.max_unread_s, self._form.sign_of_life) as stream:
            writer = _StreamWriter(stream, events, lambda: response.headers.update(self._ignored(facts)))
            try:
                await self._generate(writer)
                await stream.write(events.end())
            except ClientTooSlowError:
                if self._http.transport is not None:
                    self._http.transport.abort()
            except ConnectionError:
                raise
            except Exception as error:
                if not stream.has_begun:
                    raise
                await stream.write(events.failure(any_error(error, self._api.names)))
        return response

    async def _generate(self, writer: Writer) -> None:
        if self._api.is_probe:
            return
        backend, timeout_s = self._backend, self._api.timeout_s
        default, most = self._api.default_max_tokens, backend.cell().limits.context_length
        terms = CallTerms(
            read_time_left(timeout_s),
            most if default is None else min(default, most),
            overrides_model=self._api.options.max_tokens is not None,
            facts=self._log_facts | self._api.log_facts,
            client=self._http[CLIENT],
            trace=self._trace,
        )
        call = GenerateCall(backend.model, backend.scheduler, backend.live, writer, totals=backend.totals, terms=terms)
        try:
            async with asyncio.timeout(timeout_s):
                await call.serve(self._api.message)
        except TimeoutError:
            raise DeadlinePassedError("the request took longer than timeout_s") from None

    def _ignored(self, facts: AnswerFacts) -> dict[str, str]:
        return ignored_header(dict.fromkeys([*self._api.ignored, *facts.not_enforced, *facts.unread]))


class _StreamWriter:
    """Writes a call's responses as events."""

    def __init__(self, stream: EventStream, events: AnswerEvents, on_accepted: Callable[[], None]) -> None:
        self._stream = stream
        self._events = events
        self._on_accepted = on_accepted

    async def write(self, response: tokenizer_pb2.GenerateResponse) -> None:
        """Write a response as events; returns when there is room for another."""
        data = self._events.make(response)
        if data and self._stream.try_write(data):
            return
        if response.HasField("accepted"):
            self._on_accepted()
            self._stream.note_submission()
            if data:
                await self._stream.write(data, begins=False)
            return
        has_token = bool(response.token_ids) or response.HasField("finish")
        if not data and not has_token:
            return
        try:
            await self._stream.write(data, begins=has_token)
        except ConnectionError as error:
            # The client is gone, and the handler about to be cancelled.
            raise asyncio.CancelledError from error


def _system_fingerprint(model_digest: str, exact_fingerprint: str) -> str:
    return f"fp_{hashlib.sha256(f'{model_digest} {exact_fingerprint}'.encode()).hexdigest()[:12]}"
