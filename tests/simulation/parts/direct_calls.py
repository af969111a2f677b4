"""Clients that tokenize themselves: direct `Generate` calls, which resume with the output so far when one breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from random import Random
from typing import Protocol, cast

import grpc

from lockstep.v1 import common_pb2, scheduler_pb2
from services.scheduler.core.batch.sequence import Finish
from services.scheduler.server.exchange_codec import FINISH_REASONS
from services.scheduler.server.servicer import SchedulerServicer
from shared.errors import ServiceError
from shared.ids import RequestHandle
from shared.network.access import set_caller
from shared.tenants.client_keys import ANY_CLIENT
from tests.simulation.faults import Fault, FaultMix
from tests.simulation.network.clock import Clock
from tests.simulation.network.network import Pipe, Trouble
from tests.simulation.network.virtual_loop import VirtualLoop
from tests.simulation.parts.replica import ChoiceRecord
from tests.simulation.workload import RequestPlan
from tests.support.scheduler.engine_driver import Scores

_DELAY_S = (0.0002, 0.002)
_NOTICE_S = (0.0, 0.3)
_RETRY_S = (0.05, 0.5)
# The client's and the server's clocks differ on when a deadline passes.
_DEADLINE_SKEW_S = (-0.002, 0.002)
_STALLS_S = (0.5, 5.0)
# The scheduler is not ready, has not noticed that the previous call ended, or is ending.
_PASSING_ERRORS = ("NOT_READY", "DUPLICATE_REQUEST", "SCHEDULER_LOST")
_FINISH_REASONS = {number: reason for reason, number in FINISH_REASONS.items()}

Response = scheduler_pb2.SchedulerServiceGenerateResponse

Message = bytes | ServiceError | None
"""A serialized response, or the end of the call: an error, or None for OK."""


class Server(Protocol):
    """The part of a scheduler's process that direct calls use."""

    servicer: SchedulerServicer
    loop: VirtualLoop
    calls: dict[DirectCall, None]

    def when_running(self, action: Callable[[], object]) -> None: ...

    def check_calls(self) -> None: ...


class DirectCall:
    """One call: its task in the scheduler's process, and the stream of its responses.

    A write completes when the transport accepts the response, which it does not while the client is not reading.
    """

    def __init__(
        self,
        server: Server,
        clock: Clock,
        rng: Random,
        mix: FaultMix,
        *,
        on_message: Callable[[DirectCall, Message], None],
        on_lost: Callable[[DirectCall], None],
    ) -> None:
        self._server = server
        self._clock = clock
        self._rng = rng
        self._mix = mix
        self._on_lost = on_lost
        self._task: asyncio.Task[None] | None = None
        self._time_left_s: float | None = None
        self._is_broken = False
        self._down: Pipe[Message] = Pipe(
            clock, rng, mix, Trouble(), deliver=partial(on_message, self), on_loss=self.break_
        )

    def begin(self, request: scheduler_pb2.SchedulerServiceGenerateRequest, time_left_s: float | None) -> None:
        """Send the request."""
        self._server.calls[self] = None
        self._time_left_s = time_left_s
        self._after_delay(lambda: self._accept(request))

    def time_remaining(self) -> float | None:
        """The call's deadline in seconds, None without one; part of a `ServicerContext`."""
        return self._time_left_s

    async def write(self, response: Response) -> None:
        """Send a response to the client; part of a `ServicerContext`."""
        if self._mix.strikes(Fault.SLOW_READER, self._rng):
            await self._clock.sleep_until(self._clock.now + self._rng.uniform(*_STALLS_S))
        self._down.send(response.SerializeToString())
        if self._mix.strikes(Fault.STREAM_BREAK, self._rng):
            self.break_()

    def cancel(self) -> None:
        """Cancel the call from the client; the server is notified."""
        self._cut()
        self._after_delay(self._cancel)

    def break_(self, *, server_notices: bool = True) -> None:
        """Break the stream; each end notices at its own time, the server only if `server_notices`."""
        if self._is_broken:
            return
        self._cut()
        self._clock.after(self._rng.uniform(*_NOTICE_S), lambda: self._on_lost(self))
        if server_notices:
            self._clock.after(self._rng.uniform(*_NOTICE_S), lambda: self._server.when_running(self._cancel))

    def _accept(self, request: scheduler_pb2.SchedulerServiceGenerateRequest) -> None:
        if self._is_broken:
            return
        set_caller(ANY_CLIENT)
        generate = self._server.servicer.Generate(request, cast(grpc.aio.ServicerContext, self))
        self._task = self._server.loop.create_task(generate)
        self._task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._server.calls.pop(self, None)
        self._server.check_calls()
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ServiceError):
            raise error
        if not task.cancelled():
            self._down.send(error)

    def _cancel(self) -> None:
        self._server.calls.pop(self, None)
        if self._task is not None:
            self._task.cancel()

    def _cut(self) -> None:
        self._is_broken = True
        self._down.cut()

    def _after_delay(self, action: Callable[[], None]) -> None:
        self._clock.after(self._rng.uniform(*_DELAY_S), lambda: self._server.when_running(action))


class DirectClient:
    """Serves one request with as many calls as it takes, each of which resumes from the output so far."""

    def __init__(
        self,
        plan: RequestPlan,
        clock: Clock,
        rng: Random,
        mix: FaultMix,
        *,
        find_server: Callable[[], Server | None],
        on_over: Callable[[ChoiceRecord], None],
    ) -> None:
        """Begin the first call.

        Args:
            find_server: Returns the current scheduler; None when there is none.
            on_over: Called when a choice has ended for the client.
        """
        self._plan = plan
        self._clock = clock
        self._rng = rng
        self._mix = mix
        self._find_server = find_server
        self._on_over = on_over
        self._call: DirectCall | None = None
        # Of the cell that accepted the last call.
        self._weights_digest = ""
        deadline = None if plan.patience_s is None else clock.now + plan.patience_s
        self.records = [
            ChoiceRecord(plan, choice, RequestHandle(0), num_cached_tokens=0, deadline=deadline)
            for choice in range(plan.n)
        ]
        self._send()
        if deadline is not None:
            clock.at(deadline + rng.uniform(*_DEADLINE_SKEW_S), lambda: self._give_up("DEADLINE_PASSED"))
        if plan.cancel_after_s is not None:
            clock.after(plan.cancel_after_s, lambda: self._give_up(None))

    @property
    def _open(self) -> list[ChoiceRecord]:
        return [record for record in self.records if not record.is_over]

    def _send(self) -> None:
        if not self._open:
            return
        server = self._find_server()
        if server is None:
            self._retry()
            return
        if not self.records[0].tokens:
            # A call without tokens so far gets the prompt's log-probabilities from the start.
            self.records[0].prompt_scores.clear()
        self._call = DirectCall(
            server, self._clock, self._rng, self._mix, on_message=self._on_message, on_lost=self._on_lost
        )
        deadline = self.records[0].deadline
        self._call.begin(self._make_request(), None if deadline is None else deadline - self._clock.now)

    def _retry(self) -> None:
        self._call = None
        self._clock.after(self._rng.uniform(*_RETRY_S), self._send)

    def _make_request(self) -> scheduler_pb2.SchedulerServiceGenerateRequest:
        plan, params, options = self._plan, self._plan.params, self._plan.options
        request = scheduler_pb2.SchedulerServiceGenerateRequest(
            request_id=plan.request_id,
            prompt_token_ids=plan.prompt,
            sampling=common_pb2.SamplingParams(
                max_tokens=params.max_tokens,
                seed=params.seed,
                ignore_eos=params.ignore_eos,
                stop_token_ids=params.stop_token_ids,
                stop_token_sequences=[
                    common_pb2.TokenSequence(token_ids=sequence) for sequence in params.stop_token_sequences
                ],
                min_tokens=options.min_tokens,
                num_logprobs=options.num_logprobs,
                num_prompt_logprobs=options.num_prompt_logprobs,
                logprob_token_ids=options.logprob_token_ids,
                n=plan.n,
            ),
            priority=cast(common_pb2.Priority, plan.priority.value),
            cache_salt=plan.cache_salt.decode(),
            determinism=common_pb2.DETERMINISM_EXACT if plan.is_exact else common_pb2.DETERMINISM_ORDINARY,
        )
        if any(record.tokens or record.is_over for record in self.records):
            request.weights_digest = self._weights_digest
            request.choices_so_far.extend(
                scheduler_pb2.ChoiceSoFar(token_ids=record.tokens, is_finished=record.is_over)
                for record in self.records
            )
        return request

    def _on_message(self, call: DirectCall, message: Message) -> None:
        if call is not self._call:
            return
        if isinstance(message, bytes):
            self._take(Response.FromString(message))
        elif message is not None and message.reason in _PASSING_ERRORS:
            self._retry()
        else:
            assert (message is None) == (not self._open), "a call ends with a choice open, or fails when all are over"
            for record in self._open:
                self._end(record, error=message.reason if message is not None else None)

    def _on_lost(self, call: DirectCall) -> None:
        if call is self._call:
            self._retry()

    def _take(self, response: Response) -> None:
        if response.HasField("accepted"):
            self._weights_digest = response.accepted.weights_digest
        record = self.records[response.choice]
        record.prompt_scores += _scores_of(response.prompt_logprobs, len(record.prompt_scores) + 1)
        record.scores += _scores_of(response.logprobs, len(record.tokens))
        record.tokens += response.token_ids
        if response.HasField("finish"):
            finish = response.finish
            record.num_completion_tokens = finish.usage.num_completion_tokens
            stop_token_id = finish.stop_token_id if finish.HasField("stop_token_id") else None
            self._end(record, finish=Finish(_FINISH_REASONS[finish.reason], stop_token_id))

    def _give_up(self, error: str | None) -> None:
        """End all open choices with `error`, or as cancelled if None, and cancel the call."""
        if not self._open:
            return
        if self._call is not None:
            self._call.cancel()
            self._call = None
        for record in self._open:
            record.is_cancelled = error is None
            self._end(record, error=error)

    def _end(self, record: ChoiceRecord, *, finish: Finish | None = None, error: str | None = None) -> None:
        assert record.over_at is None, "a choice ends twice"
        record.finish, record.error, record.over_at = finish, error, self._clock.now
        self._on_over(record)
        if finish is not None and self._open and self._mix.strikes(Fault.CANCEL, self._rng):
            # A client may cancel the rest once it has one complete answer.
            self._clock.after(self._rng.uniform(*_DELAY_S), lambda: self._give_up(None))


def _scores_of(positions: Iterable[common_pb2.PositionLogprobs], first: int) -> list[Scores]:
    """Convert log-probabilities to one entry per position, numbered from `first`."""
    return [
        (
            index,
            tuple(entry.rank for entry in (one.token, *one.requested)),
            tuple((entry.token_id, entry.logprob) for entry in (one.token, *one.requested, *one.top)),
        )
        for index, one in enumerate(positions, first)
    ]
