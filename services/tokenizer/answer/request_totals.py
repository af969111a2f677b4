"""What has become of the replica's requests since its process started."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.v1 import common_pb2
from services.tokenizer.tracing.request_trace import SpanTotals
from shared.errors import ServiceError
from shared.histogram import Histogram

# The buckets are vLLM's. Source: `PrometheusStatLogger` (v1/metrics/loggers.py).
# fmt: off
_TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)
_ITL_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
_REQUEST_BOUNDS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)
# fmt: on
_TOKEN_BOUNDS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

CANCELLED = "CANCELLED"
"""The reason of a failure that is the client's wish."""
_COUNTED_METHODS = frozenset(
    f"/lockstep.v1.TokenizerService/{name}" for name in ("Generate", "Complete", "Score", "Embed")
)
_OF_HTTP = ("REQUEST_TIMEOUT", "UNSUPPORTED_MEDIA_TYPE")
"""Reasons that only the HTTP API has: a body that does not arrive in time, or in no form that is read."""
OTHER = "OTHER"
"""Any reason that this release does not know: that of a scheduler of a later one."""


class RequestTotals:
    """Times, tokens and outcomes, counted as they happen; times of choices are as the client sees them.

    Outcomes are few and fixed, so that nothing a client sends becomes a label.
    """

    def __init__(self) -> None:
        self.ttft_s = Histogram(_TTFT_BOUNDS_S)
        self.itl_s = Histogram(_ITL_BOUNDS_S)
        self.e2e_s = Histogram(_REQUEST_BOUNDS_S)
        self.queue_s = Histogram(_REQUEST_BOUNDS_S)
        self.prompt_lengths = Histogram(_TOKEN_BOUNDS)
        self.completion_lengths = Histogram(_TOKEN_BOUNDS)
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.spans = SpanTotals()
        self.num_by_finish = dict.fromkeys(_finish_reasons(), 0)
        self.num_by_failure = dict.fromkeys(sorted({*_failure_reasons(ServiceError), *_OF_HTTP, CANCELLED, OTHER}), 0)

    def count_finish(self, reason: common_pb2.FinishReason, total_s: float, usage: common_pb2.Usage) -> None:
        """Count a choice that has finished, `total_s` after its call arrived."""
        self.e2e_s.observe(total_s)
        self.prompt_lengths.observe(usage.num_prompt_tokens)
        self.completion_lengths.observe(usage.num_completion_tokens)
        if reason in self.num_by_finish:
            self.num_by_finish[reason] += 1

    def count_failure(self, reason: str | None) -> None:
        """Count a call that ended with an error; None if the error gives no reason."""
        self.num_by_failure[reason if reason in self.num_by_failure else OTHER] += 1

    def count_refusal(self, method: str, reason: str) -> None:
        """Count a call that ended before its handler saw it, if it is one of those that are counted."""
        if method in _COUNTED_METHODS:
            self.count_failure(reason)


def finish_label(reason: int) -> str:
    """A finish reason as a label."""
    return common_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def _finish_reasons() -> list[int]:
    return [reason for reason in common_pb2.FinishReason.values() if reason != common_pb2.FINISH_REASON_UNSPECIFIED]


def _failure_reasons(error: type[ServiceError]) -> Iterator[str]:
    yield error.reason
    for kind in error.__subclasses__():
        yield from _failure_reasons(kind)
