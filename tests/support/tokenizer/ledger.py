"""A ledger of live requests as tests drive it, with or without a stream."""

from __future__ import annotations

from collections.abc import Sequence

from services.tokenizer.exchange.exchange_codec import encode_submit
from services.tokenizer.exchange.request_ledger import RequestLedger
from services.tokenizer.exchange.submit_suspects import SubmitSuspects
from services.tokenizer.request.resolved_request import ResolvedRequest
from shared.errors import PoisonRequestError
from shared.ids import RequestHandle, choice_handles
from shared.request.sampling_params import SamplingParams
from tests.support.tokenizer.exchange_peer import column

LOST_AFTER_S = 60.0


def make_request(name: str = "r", n: int = 1, *, is_exact: bool = False) -> ResolvedRequest:
    sampling = SamplingParams(max_tokens=9, seed=7)
    return ResolvedRequest(name, column([1, 2, 3]), sampling, priority=1, cache_salt=b"s", n=n, is_exact=is_exact)


def sent(request: ResolvedRequest, now: float) -> tuple[int, int, list[tuple[bytes, bool]], float, float | None, int]:
    """What a scheduler receives of an attempt: handle, attempt, choices, age, time left, and earlier resumes."""
    submit = encode_submit(request, now)
    return (
        submit.handle,
        submit.attempt,
        [(choice.token_ids, choice.has_ended) for choice in submit.choices_so_far],
        submit.age.ToTimedelta().total_seconds(),
        submit.time_left.ToTimedelta().total_seconds() if submit.HasField("time_left") else None,
        submit.num_earlier_resumes,
    )


class Ledger(RequestLedger):
    """A ledger with a stream, or without one since 0."""

    def __init__(self, *, has_stream: bool = True, lost_after_s: float = LOST_AFTER_S) -> None:
        super().__init__(lost_after_s, 0.0, SubmitSuspects(lambda: 0.0))
        self.stream = self.open_stream(0.0)[0] if has_stream else 0

    def begin_request(self, *tokens: int, arrived_at: float = 0.0, deadline_at: float | None = None) -> RequestHandle:
        """A request that was submitted and has got tokens."""
        handle = self.add(make_request(), arrived_at=arrived_at, deadline_at=deadline_at)
        assert self.begin_attempt(handle, arrived_at) is not None
        if tokens:
            self.begin(self.stream, handle)
        assert self.receive(self.stream, handle, 0, list(tokens)) == list(tokens)
        return handle

    def begin_choices(self, *outputs: Sequence[int]) -> list[RequestHandle]:
        """The handles of a request's choices, which was submitted; each has got its tokens."""
        handle = self.add(make_request(n=len(outputs)), arrived_at=0.0, deadline_at=None)
        assert self.begin_attempt(handle, 0.0) is not None
        handles = choice_handles(handle, len(outputs))
        for choice, tokens in zip(handles, outputs, strict=True):
            assert self.receive(self.stream, choice, 0, list(tokens)) == list(tokens)
        return handles

    def restart(self, now: float) -> list[RequestHandle]:
        """Lose the stream and get another one."""
        self.lose_stream(self.stream, now)
        self.stream, order = self.open_stream(now)
        return order

    def outlive(self, now: float) -> tuple[list[RequestHandle], list[RequestHandle]]:
        """The scheduler dies and the next one is there.

        Returns:
            The handles to submit, and those of choices that failed.
        """
        self.lose_stream(self.stream, now)
        ends = self.on_scheduler_death(now)
        assert all(isinstance(error, PoisonRequestError) for _, error in ends)
        self.stream, order = self.open_stream(now)
        return order, [handle for handle, _ in ends]

    def submit_all(self, handles: Sequence[RequestHandle], now: float) -> list[RequestHandle]:
        """Submit those that can be; returns them."""
        return [handle for handle in handles if self.begin_attempt(handle, now) is not None]

    def accused(self, num_requests: int) -> list[RequestHandle]:
        """Requests of which two schedulers have died by now."""
        handles = [self.begin_request() for _ in range(num_requests)]
        self.submit_all(self.outlive(0.0)[0], 0.0)
        self.outlive(0.0)
        return handles
