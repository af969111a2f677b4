"""An OpenTelemetry collector on loopback, which keeps the spans that it is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2

# Reached only by a test that fails.
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as a collector sees it."""

    span: trace_pb2.Span
    resource: dict[str, Any]

    @property
    def name(self) -> str:
        """Its name."""
        return self.span.name

    @property
    def attributes(self) -> dict[str, Any]:
        """Its attributes."""
        return {each.key: _value_of(each.value) for each in self.span.attributes}

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return 1e-9 * (self.span.end_time_unix_nano - self.span.start_time_unix_nano)


@dataclass(frozen=True)
class Trace:
    """One request's spans."""

    root: ReceivedSpan
    children: list[ReceivedSpan]

    @property
    def names(self) -> list[str]:
        """The children's names, in the order of their beginnings."""
        return [child.name for child in self.children]

    def check(self) -> None:
        """Assert that the children are the root's, lie within it, and do not overlap if there is one choice."""
        end = self.root.span.start_time_unix_nano
        for child in self.children:
            assert child.span.parent_span_id == self.root.span.span_id
            assert child.span.trace_id == self.root.span.trace_id
            assert child.span.start_time_unix_nano >= self.root.span.start_time_unix_nano
            assert child.span.start_time_unix_nano <= child.span.end_time_unix_nano
            assert child.span.end_time_unix_nano <= self.root.span.end_time_unix_nano
            if "lockstep.choice" not in child.attributes:
                assert child.span.start_time_unix_nano >= end
                end = child.span.end_time_unix_nano


class TraceCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans until it is told to be slow.

    Attributes:
        endpoint: Its URL.
        spans: Those received, in their order.
        may_answer: Cleared while exports are not answered.
        num_calls: Exports begun.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[ReceivedSpan] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.num_calls = 0
        self._news = threading.Condition()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._news:
            self.num_calls += 1
            self._news.notify_all()
        self.may_answer.wait(_PATIENCE_S)
        with self._news:
            for group in request.resource_spans:
                resource = {each.key: _value_of(each.value) for each in group.resource.attributes}
                self.spans += [ReceivedSpan(span, resource) for scope in group.scope_spans for span in scope.spans]
            self._news.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Wait for a condition that changes with what is received."""
        with self._news:
            assert self._news.wait_for(is_true, _PATIENCE_S), "the spans did not come"

    def trace_of(self, request_id: str) -> Trace:
        """Wait for the spans of a request, which come together, its own last."""

        def find() -> list[ReceivedSpan]:
            return [span for span in self.spans if span.attributes.get("gen_ai.request.id") == request_id]

        self.wait_until(lambda: bool(find()))
        return self._with_children(find()[-1])

    def traces(self) -> list[Trace]:
        """All requests' spans so far."""
        return [self._with_children(span) for span in self.spans if span.span.kind == trace_pb2.Span.SPAN_KIND_SERVER]

    def _with_children(self, root: ReceivedSpan) -> Trace:
        children = [span for span in self.spans if span.span.parent_span_id == root.span.span_id]
        return Trace(root, sorted(children, key=lambda child: child.span.start_time_unix_nano))


@contextmanager
def run_collector() -> Iterator[TraceCollector]:
    """Run a collector."""
    collector, server = TraceCollector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        collector.may_answer.set()
        server.stop(None).wait()


def _value_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value_of(each) for each in value.array_value.values]
    return getattr(value, kind or "string_value")
