from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from services.tokenizer.tracing import exporter
from services.tokenizer.tracing.exporter import OtlpTracer
from services.tokenizer.tracing.request_trace import CHAT, RequestTrace, SpanTotals, traced
from tests.support.tokenizer.trace_collector import TraceCollector, run_collector

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01"


class FlakyExporter(SpanExporter):
    """Fails while it is told to."""

    succeeds = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if not self.succeeds:
            raise RuntimeError("broken")
        return SpanExportResult.SUCCESS


@pytest.fixture
def collector() -> Iterator[TraceCollector]:
    with run_collector() as collector:
        yield collector


def headers(parents: Sequence[str], states: Sequence[str] = ()) -> Callable[[str], Sequence[str]]:
    return {"traceparent": parents, "tracestate": states}.__getitem__


def begin(tracer: OtlpTracer, *parents: str, states: Sequence[str] = ()) -> RequestTrace:
    trace = tracer.try_begin(CHAT, headers(parents, states))
    assert trace is not None
    return trace


async def test_a_span_is_the_child_of_its_traceparent_and_keeps_its_tracestate(collector: TraceCollector) -> None:
    totals = SpanTotals()
    tracer = OtlpTracer(collector.endpoint, "tiny", totals)
    trace = begin(tracer, SAMPLED, states=("a=1", "b=2"))
    assert trace.trace_id == TRACE_ID
    tracer.end(trace)
    await tracer.close(60.0)
    [received] = collector.spans
    assert (received.name, received.span.trace_id.hex()) == ("chat tiny", TRACE_ID)
    assert (received.span.parent_span_id.hex(), received.span.trace_state) == (SPAN_ID, "a=1,b=2")
    assert received.resource["service.name"] == "lockstep-tokenizer"
    assert (totals.num_exported, totals.num_lost) == (1, 0)


async def test_no_proxy_leads_to_a_collector_on_loopback(
    collector: TraceCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    tracer = OtlpTracer(collector.endpoint, "tiny", SpanTotals())
    tracer.end(begin(tracer))
    await tracer.close(60.0)
    assert len(collector.spans) == 1


async def test_what_a_parent_does_not_sample_is_not_exported(collector: TraceCollector) -> None:
    totals = SpanTotals()
    tracer = OtlpTracer(collector.endpoint, "tiny", totals)
    assert tracer.try_begin(CHAT, headers([f"00-{TRACE_ID}-{SPAN_ID}-00"])) is None
    await tracer.close(60.0)
    assert (collector.spans, totals) == ([], SpanTotals())


@pytest.mark.parametrize(
    "parents",
    [
        (),
        ("",),
        ("nothing",),
        (SAMPLED.upper(),),
        (SAMPLED + "-more",),
        (f"ff-{TRACE_ID}-{SPAN_ID}-01",),
        (f"00-{'0' * 32}-{SPAN_ID}-00",),
        (f"00-{TRACE_ID}-{'0' * 16}-00",),
        (f"00-{TRACE_ID}-{SPAN_ID}",),
        ("\udce4" * 55,),
        (SAMPLED + " " * 100_000,),
        # Twice, even if both say the same.
        (SAMPLED, SAMPLED),
    ],
)
async def test_a_traceparent_that_is_not_valid_counts_as_none(
    collector: TraceCollector, parents: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    tracer = OtlpTracer(collector.endpoint, "tiny", SpanTotals())
    trace = begin(tracer, *parents, states=("\udce4=", "a" * 10_000))
    assert trace.trace_id != TRACE_ID
    tracer.end(trace)
    await tracer.close(60.0)
    [received] = collector.spans
    assert (received.span.parent_span_id, received.span.trace_state) == (b"", "")
    assert caplog.records == []


async def test_a_traceparent_of_a_later_version_is_read_as_far_as_it_is_known(collector: TraceCollector) -> None:
    tracer = OtlpTracer(collector.endpoint, "tiny", SpanTotals())
    assert begin(tracer, f"cc-{TRACE_ID}-{SPAN_ID}-01-what-comes-later").trace_id == TRACE_ID
    await tracer.close(60.0)


async def test_spans_that_a_full_queue_has_no_room_for_are_counted(
    collector: TraceCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "MAX_QUEUED_SPANS", 8)
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    totals = SpanTotals()
    tracer = OtlpTracer(collector.endpoint, "tiny", totals)
    collector.may_answer.clear()
    for _ in range(4):
        tracer.end(begin(tracer))
    # The collector has the first four, and the thread waits for its answer.
    await asyncio.to_thread(collector.wait_until, lambda: collector.num_calls == 1)
    for _ in range(11):
        tracer.end(begin(tracer))
    assert (totals.num_overflowed, totals.num_lost) == (3, 3)
    collector.may_answer.set()
    await tracer.close(60.0)
    assert (len(collector.spans), totals) == (12, SpanTotals(num_exported=12, num_overflowed=3))


async def test_a_collector_that_does_not_answer_holds_up_neither_requests_nor_the_end(
    collector: TraceCollector, caplog: pytest.LogCaptureFixture
) -> None:
    totals = SpanTotals()
    tracer = OtlpTracer(collector.endpoint, "tiny", totals)
    collector.may_answer.clear()
    for _ in range(3):
        tracer.end(begin(tracer))
    with caplog.at_level(logging.INFO):
        await tracer.close(0.05)
        [closing] = [thread for thread in threading.enumerate() if thread.name == "close-spans"]
        await asyncio.to_thread(closing.join)
    assert totals == SpanTotals(num_refused=3)
    assert [record.message for record in caplog.records] == ["spans are lost: the collector does not take them"]


async def test_a_collector_that_returns_gets_the_next_spans(caplog: pytest.LogCaptureFixture) -> None:
    totals = SpanTotals()
    inner = FlakyExporter()
    counting = exporter._CountingExporter(inner, totals)
    with caplog.at_level(logging.INFO):
        for outcome in (False, False, True, True):
            inner.succeeds = outcome
            counting.export([ReadableSpan("a"), ReadableSpan("b")])
    assert totals == SpanTotals(num_exported=4, num_refused=4)
    assert [record.message for record in caplog.records] == [
        "spans are lost: the collector does not take them",
        "the collector takes spans again",
    ]


async def test_a_block_that_ends_by_a_bug_is_an_error(collector: TraceCollector) -> None:
    tracer = OtlpTracer(collector.endpoint, "tiny", SpanTotals())
    for error in (KeyError("text of the client"), asyncio.CancelledError()):
        with pytest.raises(type(error)), traced(tracer, CHAT, headers([])):
            raise error
    await tracer.close(60.0)
    assert [span.attributes["error.type"] for span in collector.spans] == ["INTERNAL", "CANCELLED"]
    assert [span.span.status.code for span in collector.spans] == [2, 0]
    assert "text of the client" not in str(collector.spans)
