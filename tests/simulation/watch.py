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
from tests.simulation.epoch_watch import Entry, EpochWatch, Key, Number
from tests.simulation.worker import Answer
from tests.simulation.workload import CellSettings, RequestPlan, number_of
from tests.support.engine_driver import Scores, expected_scores, rows_of, scores_by_row, scores_of

_STEP_DEADLINE_S = 10.0
# The integrity check walks all blocks: a large pool has it less often than at every event.
_BLOCKS_PER_EVENT = 16


@dataclass(slots=True)
class Said:
    """What clients are told because of one event.

    Of each choice at most one run of tokens (the index of the first, and their ids) with their log-probabilities, one
    beginning (cached tokens) and one end (the finish with the number of completion tokens, or the error's reason); of
    each request the log-probabilities of some positions of its prompt.
    """

    tokens: dict[Key, tuple[int, list[int]]] = field(default_factory=dict)
    scores: dict[Key, list[Scores]] = field(default_factory=dict)
    prompt_scores: dict[Key, list[Scores]] = field(default_factory=dict)
    starts: dict[Key, int | None] = field(default_factory=dict)
    ends: dict[Key, tuple[Finish | None, int] | str] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    is_worker_dropped: bool = False

    def take_in(self, client: int, outputs: Outputs) -> None:
        """Note what a client is told."""
        for handle, first_index, token_ids in rows_of(outputs):
            assert (client, handle) not in self.tokens, "two runs of tokens at once"
            self.tokens[client, handle] = (first_index, token_ids)
        for handle, scores in scores_by_row(outputs).items():
            self.scores[client, handle] = scores
        for handle, logprobs in outputs.prompt_logprobs:
            assert (client, handle) not in self.prompt_scores, "two parts of a prompt"
            self.prompt_scores[client, handle] = scores_of(logprobs)
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
        # Of the submissions that count.
        self._live: dict[Number, Entry] = {}
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
            handles = range(submission.handle, submission.handle + submission.n)
            if any((message.client, handle) in self._entries for handle in handles):
                must.closed.add(message.client)
                return
            self._submit(message.client, submission, must, now)
        for handle, num_tokens in message.stop_ats:
            entry = self._entries.get((message.client, handle))
            if entry is not None:
                self._end(entry, must, (Finish(FinishReason.STOP_STRING), num_tokens))
        for handle in message.aborts:
            for entry in list(self._live.values()):
                if entry.request_key == (message.client, handle):
                    self._forget(entry)

    def _submit(self, client: int, submission: Submission, must: Said, now: float) -> None:
        plan = self._plans[number_of(submission.params.seed)]
        _check_times(submission, plan)
        assert submission.n == plan.n, "a replica submits other choices"
        earlier = [entry for entry in self._live.values() if entry.plan is plan]
        refusal = self._find_refusal(submission, plan, earlier)
        if refusal is not None:
            must.ends.update(((client, submission.handle + choice), refusal) for choice in submission.open_choices)
            return
        for entry in earlier:
            self._forget(entry)
        is_charged = 0 in submission.open_choices and not _num_tokens_so_far(submission, 0)
        for choice in submission.open_choices:
            entry = Entry(
                plan,
                choice,
                (client, submission.handle + choice),
                (client, submission.handle),
                submission.attempt,
                _num_tokens_so_far(submission, choice),
                now - submission.age_s,
                now,
                None if submission.time_left_s is None else now + submission.time_left_s,
                num_prompt_logprob_bytes=plan.num_prompt_logprob_bytes if is_charged else 0,
            )
            assert entry.num_tokens < len(entry.expected.tokens), "a replica submits what has ended"
            self._entries[entry.key] = self._live[entry.number] = entry

    def _find_refusal(self, submission: Submission, plan: RequestPlan, earlier: list[Entry]) -> str | None:
        """Why a submission must be refused."""
        if not self._had_worker and submission.attempt == 1:
            return "NOT_READY"
        if earlier and earlier[0].attempt >= submission.attempt:
            return "DUPLICATE_REQUEST"
        if submission.time_left_s is not None and submission.time_left_s <= 0:
            return "DEADLINE_PASSED"
        return "QUEUE_FULL" if submission.attempt == 1 and self._is_full(plan) else None

    def _is_full(self, plan: RequestPlan) -> bool:
        policy, live = self._settings.policy, self._live.values()
        num_new = sum(entry.attempt == 1 and entry.num_cached_tokens is None for entry in live)
        if num_new and num_new + plan.n > policy.max_waiting_requests:
            return True
        num_bytes = sum({entry.request_key: entry.num_prompt_logprob_bytes for entry in live}.values())
        is_charged = plan.num_prompt_logprob_bytes > 0
        return is_charged and num_bytes + plan.num_prompt_logprob_bytes > policy.max_prompt_logprob_bytes

    def _take_result(self, result: StepResult, must: Said) -> None:
        answer, epoch = self._answer, self._epoch
        assert answer is not None
        if epoch is None or answer.epoch != epoch.number or epoch.is_repeat(answer):
            return
        if answer.is_nonsense or not epoch.is_due(answer):
            must.is_worker_dropped = True
            return
        not_finite_rows = result.not_finite_rows.tolist()
        step = epoch.take_answer(answer, not_finite_rows)
        for entered, end in step.chunks:
            if entered.is_scored and entered.entry.is_live:
                self._take_prompt(entered.entry, end, must)
        counts = [1] * len(step.rows) if result.counts is None else result.counts.tolist()
        for row, (entered, count) in enumerate(zip(step.rows, counts, strict=True)):
            if not entered.entry.is_live:
                continue
            if row in not_finite_rows:
                self._end(entered.entry, must, "NUMERIC_ERROR")
            else:
                self._take_tokens(entered.entry, count, must)

    def _take_prompt(self, entry: Entry, end: int, must: Said) -> None:
        """A chunk brings the log-probabilities of the next positions of the prompt, as far as they were not told."""
        num_top, start = entry.plan.options.num_prompt_logprobs, entry.num_prompt_positions
        if num_top is None or end <= start:
            return
        must.prompt_scores[entry.key] = expected_scores(
            entry.plan.prompt[start:end], num_top, start=start, offset=start
        )
        entry.num_prompt_positions = end

    def _take_tokens(self, entry: Entry, count: int, must: Said) -> None:
        """A row brings the next tokens of the choice's one and only answer; those behind its end do not count."""
        assert count, "a row without a token for a request that has not ended"
        expected, first, num_top = entry.expected, entry.num_tokens, entry.plan.options.num_logprobs
        tokens = expected.tokens[first : first + count]
        must.tokens[entry.key] = (first, tokens)
        if num_top is not None:
            start = len(entry.plan.prompt) + first
            must.scores[entry.key] = expected_scores(tokens, num_top, start=start, offset=first)
        if not first:
            must.starts[entry.key] = entry.num_cached_tokens
        entry.num_tokens += len(tokens)
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
        del self._entries[entry.key], self._live[entry.number]

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


def _num_tokens_so_far(submission: Submission, choice: int) -> int:
    """How many completion tokens of a choice its client has."""
    if not submission.choices_so_far:
        return 0
    return len(submission.choices_so_far[choice].output) // TOKEN_DTYPE.itemsize
