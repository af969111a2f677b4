"""Requests to a cell that the test plays: it reads what is sent to the scheduler and provides the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from typing_extensions import override

from lockstep.internal.v1 import exchange_pb2
from services.tokenizer.answer.answer import Choice, Generation
from services.tokenizer.answer.completion import Completion
from services.tokenizer.answer.logprobs import LogprobColumns
from services.tokenizer.answer.request_totals import RequestTotals
from services.tokenizer.exchange.cell_requests import CellRequests
from services.tokenizer.exchange.scheduler_stream import SchedulerStream
from services.tokenizer.request.resolved_request import ResolvedRequest
from services.tokenizer.text.detokenizer import ByteLevelDetokenizer
from shared.errors import ServiceError
from shared.ids import RequestHandle
from shared.request.sampling_params import SamplingParams
from shared.wire import Introduction, introduce_self
from tests.support.tokenizer.exchange_peer import column


def own_tokens(logprobs: LogprobColumns) -> list[int]:
    """The own token of each position."""
    return [message.token.token_id for message in logprobs.messages(lambda _: b"")]


class Sink(Choice):
    """A choice that keeps what it is handed, and is stopped at `stop_at` tokens."""

    def __init__(self, stop_at: int | None = None) -> None:
        generation = Generation(arrived_at=0.0, totals=RequestTotals())
        super().__init__(generation, Completion(ByteLevelDetokenizer({}, {}), ()), num_prompt_tokens=3)
        self.stop_at = stop_at
        self.resumes: list[tuple[int, bool]] = []
        self.token_ids: list[int] = []
        self.num_cached_tokens: list[int] = []
        # Each entry with the number of tokens received before it.
        self.logprobs: list[tuple[int, list[int]]] = []
        self.prompt_ids: list[int] = []
        self.ends: list[exchange_pb2.RequestEnd] = []
        self.error: ServiceError | None = None
        self.failed = asyncio.Event()

    @override
    def submitted(self, num_resumes: int, *, is_exact: bool) -> None:
        self.resumes.append((num_resumes, is_exact))

    @override
    def resumed(self, num_resumes: int) -> None:
        self.resumes.append((num_resumes, self.resumes[-1][1]))

    @override
    def begin(self, num_cached_tokens: int, queue_s: float | None, prefill_s: float | None = None) -> None:
        self.num_cached_tokens.append(num_cached_tokens)

    @override
    def receive_logprobs(self, logprobs: LogprobColumns) -> None:
        self.logprobs.append((len(self.token_ids), own_tokens(logprobs)))

    @override
    def receive_prompt_logprobs(self, logprobs: LogprobColumns) -> None:
        self.prompt_ids += own_tokens(logprobs)

    @override
    def receive(self, token_ids: Sequence[int], end: exchange_pb2.RequestEnd | None) -> int | None:
        self.token_ids += token_ids
        if end is not None:
            self.ends.append(end)
            return None
        return self.stop_at if self.stop_at is not None and len(self.token_ids) >= self.stop_at else None

    @override
    def fail(self, error: ServiceError) -> None:
        self.error = error
        self.failed.set()


class Requests(CellRequests):
    """`CellRequests` with an open stream, on which requests are submitted at once."""

    def __init__(self, lost_after_s: float = 60.0, exact_fingerprint: str = "") -> None:
        super().__init__(lost_after_s)
        self.last_stream = self.open_next("first", exact_fingerprint)

    def open_next(
        self, instance_id: str = "next", exact_fingerprint: str = "", introduction: Introduction | None = None
    ) -> SchedulerStream:
        """Open another stream, to the scheduler with this instance id; its cell is by default of this release."""
        self.last_stream = SchedulerStream(self.make_submit)
        info = exchange_pb2.CellInfo(
            scheduler_instance_id=instance_id,
            exact_fingerprint=exact_fingerprint,
            introduction=(introduction or introduce_self()).encode(),
        )
        self.open_stream(self.last_stream, info)
        return self.last_stream

    def deliver(self, outputs: exchange_pb2.Outputs) -> None:
        """Let outputs arrive on the stream."""
        self.on_outputs(self.last_stream, outputs)

    async def begin_request(self, sink: Sink, request_id: str = "r", deadline_at: float | None = None) -> RequestHandle:
        """Add a request and consume its submit; returns its handle."""
        handle = self.add(sink, request_id, deadline_at)
        assert [submit.handle for submit in (await self.next_message()).submits] == [handle]
        return handle

    def add(self, sink: Sink, request_id: str = "r", deadline_at: float | None = None) -> RequestHandle:
        """Add a request without consuming its submit; returns its handle."""
        request = ResolvedRequest(request_id, column([1, 2, 3]), SamplingParams(max_tokens=4))
        return self.submit(request, [sink], arrived_at=time.monotonic(), deadline_at=deadline_at)

    async def begin_choices(self, *sinks: Sink) -> RequestHandle:
        """Add a request with a choice per sink, and consume its submit; returns its handle."""
        request = ResolvedRequest("r", column([1, 2, 3]), SamplingParams(max_tokens=4), n=len(sinks))
        handle = self.submit(request, sinks, arrived_at=time.monotonic(), deadline_at=None)
        assert (await self.next_submit()).n == len(sinks)
        return handle

    async def next_message(self) -> exchange_pb2.ExchangeRequest:
        """The next message to the scheduler."""
        return await anext(self.last_stream.messages())

    async def next_submit(self) -> exchange_pb2.Submit:
        """The only submit in the next message to the scheduler."""
        [submit] = (await self.next_message()).submits
        return submit
