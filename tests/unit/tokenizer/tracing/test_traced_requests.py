"""The spans of requests, whichever way they come in and end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2, tokenizer_pb2
from shared.errors import NumericError
from tests.support.tokenizer.exchange_peer import Row, make_end, make_error_end
from tests.support.tokenizer.http_client import MESSAGES, HttpService, run_http_service
from tests.support.tokenizer.tokenizer_service import Service, read_rest
from tests.support.tokenizer.trace_collector import Trace, TraceCollector, run_collector

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}
MAX_TOKENS = common_pb2.FINISH_REASON_MAX_TOKENS
PHASES = ["render", "queue", "prefill", "decode"]
CHAT = tokenizer_pb2.Chat(messages=[tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_USER, content="hi")])
SECRET = "confidential"
HTTP_REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "The fox"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/responses": {"input": "hi"},
}


@asynccontextmanager
async def run_traced(
    model_dir: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[tuple[HttpService, TraceCollector]]:
    """Run a service whose spans leave at once."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with run_collector() as collector:
        async with run_http_service(model_dir, socket_dir, otlp_endpoint=collector.endpoint, **settings) as http:
            yield http, collector


@pytest.fixture
async def running(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[HttpService, TraceCollector]]:
    async with run_traced(model_dir, tmp_path, monkeypatch) as running:
        yield running


async def until_traced(collector: TraceCollector, num_traces: int) -> list[Trace]:
    """The traces of as many requests."""
    await asyncio.to_thread(collector.wait_until, lambda: len(collector.traces()) >= num_traces)
    for trace in collector.traces():
        trace.check()
    return collector.traces()


def send_all(service: Service, sent: exchange_pb2.Submit, *, num_choices: int = 1) -> None:
    """Send each choice's three tokens in two messages."""
    for handle in range(sent.handle, sent.handle + num_choices):
        service.peer.send(Row(handle, 0, [5], num_cached_tokens=2, queue_time_us=1, prefill_time_us=1))
        service.peer.send(Row(handle, 1, [6, 7]), ends=[make_end(handle, MAX_TOKENS, 3)])


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_every_route_is_traced_under_its_traceparent(
    running: tuple[HttpService, TraceCollector], *, is_streamed: bool
) -> None:
    http, collector = running
    for number, (path, body) in enumerate(HTTP_REQUESTS.items(), 1):
        began_at = time.monotonic()
        task, [sent] = await http.begin(path, {**body, "stream": is_streamed}, headers=PARENT)
        send_all(http.service, sent)
        assert (await task).status == 200
        took_s = time.monotonic() - began_at
        trace = (await until_traced(collector, number))[-1]
        operation = "text_completion" if path == "/v1/completions" else "chat"
        assert (trace.root.name, trace.names) == (f"{operation} tiny", PHASES)
        assert (trace.root.span.trace_id.hex(), trace.root.span.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
        assert trace.root.span.trace_state == "vendor=1"
        assert sum(child.duration_s for child in trace.children) <= trace.root.duration_s <= took_s
        attributes = trace.root.attributes
        assert attributes["gen_ai.request.id"] == sent.request_id
        assert attributes["gen_ai.operation.name"] == operation
        assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "tiny"
        assert attributes["gen_ai.request.max_tokens"] == sent.max_tokens
        assert attributes["gen_ai.usage.input_tokens"] == len(sent.prompt_token_ids) // 4
        assert attributes["gen_ai.usage.cache_read.input_tokens"] == 2
        assert attributes["gen_ai.usage.output_tokens"] == 3
        assert attributes["gen_ai.response.finish_reasons"] == ["length"]
        assert attributes["gen_ai.latency.time_in_queue"] == pytest.approx(1e-6)
        assert 0 < attributes["gen_ai.latency.time_to_first_token"] <= attributes["gen_ai.latency.e2e"]
        assert attributes["gen_ai.latency.e2e"] == pytest.approx(trace.root.duration_s, abs=1e-6)
        assert "error.type" not in attributes


async def test_calls_over_grpc_are_traced_with_every_choice(running: tuple[HttpService, TraceCollector]) -> None:
    http, collector = running
    service, metadata = http.service, tuple(PARENT.items())
    two = tokenizer_pb2.GenerateRequest(chat=CHAT, sampling=common_pb2.SamplingParams(n=2))
    stream = service.stub.Generate(two, metadata=metadata)
    send_all(service, await service.peer.submits.get(), num_choices=2)
    assert [response async for response in stream]
    prompts = [tokenizer_pb2.Prompt(text="The fox"), tokenizer_pb2.Prompt(text="hi")]
    listed = tokenizer_pb2.GenerateRequest(prompts=tokenizer_pb2.PromptList(prompts=prompts))
    whole = asyncio.ensure_future(
        service.stub.Complete(tokenizer_pb2.CompleteRequest(request=listed), metadata=metadata)
    )
    for _ in prompts:
        send_all(service, await service.peer.submits.get())
    await whole
    first, second = await until_traced(collector, 2)
    for trace, name, places in ((first, "chat", {(0, 0), (0, 1)}), (second, "text_completion", {(0, 0), (1, 0)})):
        assert (trace.root.name, trace.root.span.trace_id.hex()) == (f"{name} tiny", TRACE_ID)
        assert sorted(trace.names) == sorted(["render", *2 * PHASES[1:]])
        assert trace.root.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
        choices = [child.attributes for child in trace.children if child.name == "decode"]
        assert {(each["lockstep.prompt"], each["lockstep.choice"]) for each in choices} == places
    assert first.root.attributes["gen_ai.request.choice.count"] == 2


async def test_refusals_and_failures_are_errors_without_a_clients_text(
    running: tuple[HttpService, TraceCollector],
) -> None:
    http, collector = running
    path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}]}
    refused = [{"messages": SECRET}, {**body, "model": SECRET}, {**body, "temperature": 99}]
    for each in refused:
        assert (await http.post(path, each)).status >= 400
    with pytest.raises(grpc.aio.AioRpcError):
        await http.service.stub.Complete(
            tokenizer_pb2.CompleteRequest(request=tokenizer_pb2.GenerateRequest(text=SECRET, model=SECRET))
        )
    task, [sent] = await http.begin(path, {**body, "stream": True})
    failed = make_error_end(sent.handle, NumericError(SECRET))
    failed.queue_time_us = 1
    http.service.peer.send(ends=[failed])
    assert (await task).status >= 400
    traces = await until_traced(collector, 5)
    reasons = [trace.root.attributes["error.type"] for trace in traces]
    assert reasons == ["INVALID_REQUEST", "MODEL_NOT_FOUND", "INVALID_REQUEST", "MODEL_NOT_FOUND", "NUMERIC_ERROR"]
    assert all(trace.root.span.status.code == trace.root.span.status.STATUS_CODE_ERROR for trace in traces)
    assert [trace.names for trace in traces] == [*4 * [[]], ["render", "queue"]]
    assert not any(SECRET in str(span.span) for span in collector.spans)


async def test_a_stream_that_its_client_leaves_ends_as_it_stands(running: tuple[HttpService, TraceCollector]) -> None:
    http, collector = running
    queued, _ = await http.service.begin(tokenizer_pb2.GenerateRequest(text="The fox", request_id="queued"))
    queued.cancel()
    running_call, sent = await http.service.begin(tokenizer_pb2.GenerateRequest(text="The fox", request_id="running"))
    for number in range(2):
        http.service.peer.send(Row(sent.handle, number, [5], queue_time_us=1, prefill_time_us=1))
        await running_call.read()
    running_call.cancel()
    traces = [await asyncio.to_thread(collector.trace_of, name) for name in ("queued", "running")]
    assert [trace.names for trace in traces] == [["render", "queue_or_prefill"], PHASES]
    for trace in traces:
        trace.check()
        attributes = trace.root.attributes
        assert (attributes["error.type"], trace.root.span.status.code) == ("CANCELLED", 0)
        assert attributes["gen_ai.response.finish_reasons"] == ["abort"]


async def test_the_death_of_a_worker_and_of_a_scheduler_are_resumes(
    running: tuple[HttpService, TraceCollector],
) -> None:
    http, collector = running
    peer, request = http.service.peer, tokenizer_pb2.GenerateRequest(text="The fox", request_id="resumed")
    call, sent = await http.service.begin(request)
    peer.send_outputs(exchange_pb2.Outputs(resumes=[exchange_pb2.ChoiceResume(handle=sent.handle, num_resumes=1)]))
    for number in range(2):
        peer.send(Row(sent.handle, number, [5], queue_time_us=1, prefill_time_us=1))
        await call.read()
    peer.break_stream()
    peer.attach()
    again = await peer.submits.get()
    peer.send(Row(again.handle, 2, [5]))
    await call.read()
    peer.send(Row(again.handle, 3, [5]), ends=[make_end(again.handle, MAX_TOKENS, 4)])
    await read_rest(call)
    trace = await asyncio.to_thread(collector.trace_of, "resumed")
    trace.check()
    assert trace.names == ["render", "resume", "queue", "prefill", "decode", "resume", "decode"]
    assert trace.root.attributes["lockstep.num_resumes"] == 2


async def test_a_model_has_the_names_of_the_request_and_of_the_answer(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_traced(model_dir, tmp_path, monkeypatch, served_model_name=("first", "second")) as (http, collector):
        await http.answer("/v1/completions", {"prompt": "The fox", "model": "second"}, [5])
        [trace] = await until_traced(collector, 1)
        assert trace.root.name == "text_completion first"
        attributes = trace.root.attributes
        assert (attributes["gen_ai.request.model"], attributes["gen_ai.response.model"]) == ("second", "first")


async def test_spans_leave_before_the_service_does(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.tokenizer.service._FLUSH_S", 60.0)
    async with run_traced(model_dir, tmp_path, monkeypatch) as (http, collector):
        monkeypatch.undo()
        await http.answer("/v1/completions", {"prompt": "The fox"}, [5])
    assert len(collector.traces()) == 1
