"""Exports spans to an OpenTelemetry collector, by OTLP over gRPC; the only module that imports OpenTelemetry.

It has a thread of its own, which takes spans from a queue: no request waits for the collector. The SDK reads its usual
variables, such as OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME and OTEL_EXPORTER_OTLP_HEADERS.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from typing_extensions import override

from services.tokenizer.tracing.request_trace import CANCELLED, GetHeader, RequestTrace, SpanTotals
from shared.network.addresses import LOOPBACK_HOSTS
from shared.release import find_release

logger = logging.getLogger(__name__)

SERVICE_NAME = "lockstep-tokenizer"
"""`service.name`, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES has another."""

MAX_QUEUED_SPANS = 4096

_PROVIDER = "lockstep"


class OtlpTracer:
    """Makes the spans of requests and exports them.

    A request's span is a child of its `traceparent`, which decides whether it is sampled unless OTEL_TRACES_SAMPLER
    says otherwise. A header that is not valid counts as none.

    Source: W3C Trace Context, sections 3.2 and 3.3.
    """

    def __init__(self, endpoint: str, model_name: str, totals: SpanTotals) -> None:
        """Start the thread that exports; `endpoint` is a URL as `--otlp-endpoint` takes it."""
        # We count and log what is lost ourselves: the SDK would log every try.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._model_name = model_name
        # No proxy of the environment leads to loopback. The exporter's type of options has no numbers.
        options: Any = (("grpc.enable_http_proxy", 0),) if urlsplit(endpoint).hostname in LOOPBACK_HOSTS else None
        self._exporter = _CountingExporter(OTLPSpanExporter(endpoint, channel_options=options), totals)
        own = Resource({"service.name": SERVICE_NAME, "service.version": find_release()})
        self._provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(_BoundedProcessor(self._exporter, totals))
        self._tracer = self._provider.get_tracer("services.tokenizer", find_release())
        self._propagator = TraceContextTextMapPropagator()

    def try_begin(self, operation: str, get_header: GetHeader) -> RequestTrace | None:
        """See `Tracer`."""
        parents = get_header("traceparent")
        # More than one is no valid traceparent, as W3C says.
        carrier = {"traceparent": parents, "tracestate": get_header("tracestate")} if len(parents) == 1 else {}
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={"gen_ai.operation.name": operation, "gen_ai.provider.name": _PROVIDER},
        )
        if not span.is_recording():
            return None
        return RequestTrace(span, format_trace_id(span.get_span_context().trace_id))

    def end(self, trace: RequestTrace) -> None:
        """See `Tracer`."""
        now = time.monotonic()
        trace.end(now)
        span: Any = trace.span

        def at_ns(moment: float) -> int:
            elapsed_ns: int = round(1e9 * (moment - trace.arrived_at))
            return int(span.start_time) + elapsed_ns

        context = set_span_in_context(span)
        for phase, attributes in trace.phases(now):
            child = self._tracer.start_span(
                phase.name, context=context, start_time=at_ns(phase.began_at), attributes=attributes
            )
            child.end(at_ns(phase.ended_at))
        span.set_attributes(trace.attributes)
        if trace.failure is not None and trace.failure != CANCELLED:
            span.set_status(Status(StatusCode.ERROR))
        span.end(at_ns(now))

    async def close(self, timeout_s: float) -> None:
        """Export what is queued, for `timeout_s` at most; the rest is lost."""
        loop, is_closed = asyncio.get_running_loop(), asyncio.Event()

        def close() -> None:
            self._provider.shutdown()
            # Later than `timeout_s` the loop may be closed.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(is_closed.set)

        threading.Thread(target=close, name="close-spans", daemon=True).start()
        with suppress(TimeoutError):
            await asyncio.wait_for(is_closed.wait(), timeout_s)
        # Ends a call that the collector has not answered.
        self._exporter.shutdown()


class _CountingExporter(SpanExporter):
    """Counts the spans that leave, and logs when the collector begins and ceases to fail."""

    def __init__(self, exporter: SpanExporter, totals: SpanTotals) -> None:
        self.num_taken = 0
        """Spans that were taken from the queue."""
        self._exporter = exporter
        self._totals = totals
        self._is_failing = False

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        try:
            result = self._exporter.export(spans)
        except Exception:  # noqa: BLE001 - spans are lost, not the thread
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self._totals.num_exported += len(spans)
        else:
            self._totals.num_refused += len(spans)
        self._note(is_failing=result is not SpanExportResult.SUCCESS)
        return result

    @override
    def shutdown(self) -> None:
        self._exporter.shutdown()

    def _note(self, *, is_failing: bool) -> None:
        if is_failing and not self._is_failing:
            logger.warning("spans are lost: the collector does not take them")
        elif self._is_failing and not is_failing:
            logger.info("the collector takes spans again", extra={"num_lost": self._totals.num_lost})
        self._is_failing = is_failing


class _BoundedProcessor(BatchSpanProcessor):
    """Counts the spans for which the queue has no room, where the SDK would drop the oldest."""

    def __init__(self, exporter: _CountingExporter, totals: SpanTotals) -> None:
        super().__init__(exporter, max_queue_size=MAX_QUEUED_SPANS)
        self._counting = exporter
        self._totals = totals
        self._num_queued = 0

    @override
    def on_end(self, span: ReadableSpan) -> None:
        # Each of the two threads writes only its own count.
        if self._num_queued - self._counting.num_taken >= MAX_QUEUED_SPANS:
            self._totals.num_overflowed += 1
            return
        self._num_queued += 1
        super().on_end(span)
