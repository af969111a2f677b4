"""What an engine must say to every event, worked out from outside.

The watch is told each event, and all that the engine does about it. It knows the answer of every request, so it knows
every token and every end that the event has to bring, and that nothing else may come.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.batch import Outputs, StepResult
from services.scheduler.engine import Engine
from services.scheduler.events import (
    AbortRequest,
    Action,
    ClientGone,
    ClientMessage,
    CloseClient,
    Deliver,
    DropWorker,
    Event,
    SendStep,
    StepReturned,
    Submission,
    WorkerAttached,
    WorkerLost,
)
from services.scheduler.sequence import Finish, FinishReason
from shared.limits import TOKEN_DTYPE
from tests.simulation.epoch_watch import Entry, EpochWatch, Key
from tests.simulation.worker import Answer
from tests.simulation.workload import CellSettings, RequestPlan, number_of

_STEP_DEADLINE_S = 10.0
# The integrity check walks all blocks: a large pool has it less often than at every event.
_BLOCKS_PER_EVENT = 16


@dataclass(slots=True)
class Said:
    """What clients are told because of one event.

    Of each request at most one token (its index and id), one beginning (cached tokens) and one end (the finish with
    the number of completion tokens, or the error's reason).
    """

    tokens: dict[Key, tuple[int, int]] = field(default_factory=dict)
    starts: dict[Key, int | None] = field(default_factory=dict)
    ends: dict[Key, tuple[Finish | None, int] | str] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    is_worker_dropped: bool = False

    def take_in(self, client: int, outputs: Outputs) -> None:
        """Note what a client is told."""
        rows = zip(outputs.handles.tolist(), outputs.first_indexes.tolist(), outputs.token_ids.tolist(), strict=True)
        for handle, first_index, token_id in rows:
            assert (client, handle) not in self.tokens, "two tokens at once"
            self.tokens[client, handle] = (first_index, token_id)
        for start in outputs.starts:
            assert (client, start.handle) not in self.starts, "two beginnings"
            self.starts[client, start.handle] = start.num_cached_tokens
        for end in outputs.ends:
            assert (client, end.handle) not in self.ends, "two ends"
            self.ends[client, end.handle] = (
                (end.finish, end.num_completion_tokens) if end.error is None else end.error.reason
            )


class EngineWatch:
    """Follows one engine and raises AssertionError when it does not do as it must."""

    def __init__(self, settings: CellSettings, plans: list[RequestPlan]) -> None:
        """Follow an engine from its start; `plans` are the requests by their numbers, and may grow."""
        self._settings = settings
        self._plans = plans
        self._entries: dict[Key, Entry] = {}
        # By the request's number: its submission that counts.
        self._live: dict[int, Entry] = {}
        self._epoch: EpochWatch | None = None
        self._had_worker = False
        self._answer: Answer | None = None
        self._num_blocks_unchecked = 0

    def on_answer(self, answer: Answer) -> None:
        """The next event is this answer."""
        self._answer = answer

    def on_event(self, engine: Engine, event: Event, actions: list[Action], now: float) -> None:
        """Check what the engine said to an event, and what it did."""
        must = Said()
        self._expire(must, now)
        self._take_in(event, must, now)
        said = Said()
        for action in actions:
            match action:
                case Deliver(client, outputs):
                    said.take_in(client, outputs)
                case CloseClient(client):
                    said.closed.add(client)
                case DropWorker(epoch):
                    self._drop(epoch, must, now)
                    said.is_worker_dropped = True
                case SendStep(step):
                    assert self._epoch is not None, "a step without a worker"
                    self._epoch.check_step(step, now)
        assert said == must, f"the engine said {said}, it must say {must}"
        self._check_rest(engine, now)

    def check_end(self, engine: Engine) -> None:
        """Check an engine that has nothing more to do."""
        assert not self._live, f"never answered: {[entry.plan.request_id for entry in self._live.values()]}"
        engine.check_integrity()
        state = engine.state()
        assert (state.num_running, state.num_waiting, state.num_used_blocks) == (0, 0, 0), "something is left over"

    def _expire(self, must: Said, now: float) -> None:
        for entry in list(self._live.values()):
            if entry.deadline is not None and entry.deadline <= now:
                self._end(entry, must, "DEADLINE_PASSED")

    def _take_in(self, event: Event, must: Said, now: float) -> None:
        match event:
            case ClientMessage():
                self._take_message(event, must, now)
            case ClientGone(client):
                for entry in list(self._live.values()):
                    if entry.key[0] == client:
                        self._forget(entry)
            case AbortRequest(request_id):
                for entry in list(self._live.values()):
                    if entry.plan.request_id == request_id:
                        self._end(entry, must, "ABORTED_BY_CALL")
            case WorkerAttached(facts):
                self._had_worker = True
                self._epoch = EpochWatch(facts.epoch, self._settings, self._live)
            case WorkerLost(epoch):
                if self._epoch is not None and self._epoch.number == epoch:
                    self._epoch = None
            case StepReturned(result):
                self._take_result(result, must)

    def _take_message(self, message: ClientMessage, must: Said, now: float) -> None:
        for submission in message.submissions:
            if (message.client, submission.handle) in self._entries:
                must.closed.add(message.client)
                return
            self._submit(message.client, submission, must, now)
        for handle, num_tokens in message.stop_ats:
            entry = self._entries.get((message.client, handle))
            if entry is not None:
                self._end(entry, must, (Finish(FinishReason.STOP_STRING), num_tokens))
        for handle in message.aborts:
            entry = self._entries.get((message.client, handle))
            if entry is not None:
                self._forget(entry)

    def _submit(self, client: int, submission: Submission, must: Said, now: float) -> None:
        plan = self._plans[number_of(submission.params.seed)]
        _check_times(submission, plan)
        key = (client, submission.handle)
        earlier = self._live.get(plan.number)
        refusal = self._find_refusal(submission, earlier)
        if refusal is not None:
            must.ends[key] = refusal
            return
        if earlier is not None:
            self._forget(earlier)
        entry = Entry(
            plan,
            key,
            submission.attempt,
            len(submission.output) // TOKEN_DTYPE.itemsize,
            now - submission.age_s,
            now,
            None if submission.time_left_s is None else now + submission.time_left_s,
        )
        assert entry.num_tokens < len(plan.by_cell.tokens), "a replica submits what has ended"
        self._entries[key] = self._live[plan.number] = entry

    def _find_refusal(self, submission: Submission, earlier: Entry | None) -> str | None:
        """Why a submission must be refused."""
        if not self._had_worker and submission.attempt == 1:
            return "NOT_READY"
        if earlier is not None and earlier.attempt >= submission.attempt:
            return "DUPLICATE_REQUEST"
        if submission.time_left_s is not None and submission.time_left_s <= 0:
            return "DEADLINE_PASSED"
        num_new = sum(entry.attempt == 1 and entry.num_cached_tokens is None for entry in self._live.values())
        is_full = num_new >= self._settings.policy.max_waiting_requests
        return "QUEUE_FULL" if is_full and submission.attempt == 1 else None

    def _take_result(self, result: StepResult, must: Said) -> None:
        answer, epoch = self._answer, self._epoch
        assert answer is not None
        if epoch is None or answer.epoch != epoch.number or epoch.is_repeat(answer):
            return
        if answer.is_nonsense or not epoch.is_due(answer):
            must.is_worker_dropped = True
            return
        not_finite_rows = result.not_finite_rows.tolist()
        for row, entered in enumerate(epoch.take_answer(answer, not_finite_rows)):
            if not entered.entry.is_live:
                continue
            if row in not_finite_rows:
                self._end(entered.entry, must, "NUMERIC_ERROR")
            else:
                self._take_token(entered.entry, must)

    def _take_token(self, entry: Entry, must: Said) -> None:
        """A row brings the next token of the request's one and only answer."""
        expected = entry.plan.by_cell
        must.tokens[entry.key] = (entry.num_tokens, expected.tokens[entry.num_tokens])
        if not entry.num_tokens:
            must.starts[entry.key] = entry.num_cached_tokens
        entry.num_tokens += 1
        if entry.num_tokens == len(expected.tokens):
            self._end(entry, must, (expected.finish, entry.num_tokens))

    def _drop(self, epoch: int, must: Said, now: float) -> None:
        """The engine gives the worker up: for an answer that makes no sense, or for none in time."""
        assert self._epoch is not None
        assert self._epoch.number == epoch, "the engine drops a worker that it does not have"
        is_late = bool(self._epoch.in_flight) and now >= self._epoch.in_flight[0].sent_at + _STEP_DEADLINE_S
        assert must.is_worker_dropped or is_late, "the engine drops a good worker"
        must.is_worker_dropped = True
        self._epoch = None

    def _end(self, entry: Entry, must: Said, end: tuple[Finish | None, int] | str) -> None:
        must.ends[entry.key] = end
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        entry.is_live = False
        del self._entries[entry.key], self._live[entry.plan.number]

    def _check_rest(self, engine: Engine, now: float) -> None:
        if self._epoch is not None and self._live:
            assert self._epoch.in_flight, "requests wait, the worker is idle, and no step is sent"
        wakeup = engine.next_wakeup()
        assert wakeup is None or wakeup > now, "the engine wants to be woken in the past"
        self._num_blocks_unchecked += _BLOCKS_PER_EVENT
        if self._num_blocks_unchecked >= self._settings.num_blocks:
            self._num_blocks_unchecked = 0
            engine.check_integrity()


def _check_times(submission: Submission, plan: RequestPlan) -> None:
    """Check that a caller's patience counts from the request's arrival, whatever the attempt."""
    if plan.patience_s is None:
        assert submission.time_left_s is None, "a deadline that nobody gave"
        return
    assert submission.time_left_s is not None, "a deadline is forgotten"
    time_left_s = max(0.0, plan.patience_s - submission.age_s)
    assert abs(submission.time_left_s - time_left_s) < 1e-3, "a deadline is moved"
