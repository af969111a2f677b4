"""What an engine may send to one rank within one epoch, and how it must handle the answers.

Steps refer to slots. The request in a slot is identified by the sampling seed of the sequence that entered it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from services.scheduler.core.batch.sequence import RequestKey
from services.scheduler.core.batch.step import ScheduledBatch, Step
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from services.scheduler.server.direct_clients import DIRECT_CLIENT
from shared.step.step import PrefillChunk, StepKind, StepResult
from tests.simulation.network.step_stream import Answer
from tests.simulation.watches.admission_bound import max_steps_to_admission
from tests.simulation.watches.share_watch import Claim, RankView, ShareWatch
from tests.simulation.watches.state_watch import StateWatch, Text
from tests.simulation.workload import CellSettings, Expected, RequestPlan, Salt, number_of
from tests.support.worker.worker_steps import unpack

# A step that makes no progress for this long ends its epoch.
_STEP_DEADLINE_S = 10.0

Key = tuple[int, int]
"""(client, handle)"""

Number = tuple[int, int]
"""(request number, choice)"""


@dataclass(slots=True, eq=False)
class Entry:
    """One choice of a submission that an engine has accepted; it is live until it ends or must be forgotten."""

    plan: RequestPlan
    choice: int
    key: Key
    request_key: Key
    attempt: int
    num_tokens: int
    arrived_at: float
    taken_in_at: float
    deadline: float | None
    is_live: bool = True
    has_started: bool = False
    num_cached_tokens: int | None = None
    """Cached tokens at its first admission; None before."""
    num_prompt_logprob_bytes: int = 0
    """Bytes that its request is charged for prompt log-probabilities."""
    num_prompt_positions: int = 1
    """Prompt positions whose log-probabilities were sent, including the first, which has none."""
    min_resumes: int = 0
    """Resumes its replica reported at submission, plus lost epochs in whose steps in flight it was."""
    max_resumes: int = 0
    """As `min_resumes`, with the lost epochs in whose batch it was."""
    rank: int | None = None
    """The rank of the step that computed it last."""
    num_in_flight: int = 0
    """Steps of `rank` in flight that compute it."""

    @property
    def is_new(self) -> bool:
        """Whether it was never admitted, here or in an earlier attempt; a direct client's word does not count."""
        is_first = self.attempt == 1 or self.key[0] == DIRECT_CLIENT
        return is_first and self.num_cached_tokens is None

    def claim(self, block_size: int) -> Claim:
        """What it needs while it waits."""
        num_blocks = -(-(len(self.plan.prompt) + self.num_tokens) // block_size)
        return Claim(self.plan.tenant, self.plan.priority, num_blocks, is_new=self.is_new)

    @property
    def number(self) -> Number:
        """Its identity, the same for all attempts."""
        return self.plan.number, self.choice

    @property
    def text(self) -> Text:
        """All that the cell must compute, with the prompt."""
        return self.plan.salt, [*self.plan.prompt, *self.expected.tokens]

    @property
    def expected(self) -> Expected:
        """The answer that the cell must produce."""
        return self.plan.by_cell[self.choice]


@dataclass(frozen=True, slots=True, eq=False)
class Entered:
    """A sequence in the worker's batch."""

    entry: Entry
    number: int
    """The position in which it entered within the epoch, from 0."""
    after_step: int
    """The last step that had returned when it was sent."""
    is_scored: bool
    """Whether it returns the log-probabilities of its prompt."""
    blocks: list[int]
    """Its blocks."""
    num_tokens_before: int
    """Completion tokens that it had when it entered."""

    @property
    def claim(self) -> Claim:
        """What it holds."""
        plan = self.entry.plan
        has_token = self.entry.num_tokens > self.num_tokens_before
        return Claim(plan.tenant, plan.priority, len(self.blocks), frozenset(self.blocks), has_token=has_token)


@dataclass(frozen=True, slots=True)
class SentStep:
    """A step in flight."""

    step: Step
    sent_at: float
    rows: list[Entered]
    """The sequence of each row."""
    chunks: list[tuple[Entered, int]]
    """The sequence of each prompt chunk, and the number of its prompt tokens computed after this step."""

    @property
    def is_decode(self) -> bool:
        """Whether it is a pure decode, on all ranks if they are coupled."""
        is_eager = self.step.num_tokens_across_dp and not self.step.graph_batch_size
        return self.step.batch.kind is StepKind.DECODE and not is_eager

    @property
    def sequences(self) -> set[Entered]:
        """The sequences for which it computes tokens."""
        return {*self.rows, *(entered for entered, _ in self.chunks)}

    @property
    def entries(self) -> set[Entry]:
        """The choices for which it computes tokens."""
        return {entered.entry for entered in self.sequences}


@dataclass(slots=True)
class Signs:
    """When a rank was last heard, and when it last made progress."""

    heard_at: float
    got_on_at: float = float("-inf")
    progress: int | None = None

    def take(self, progress: int, now: float) -> None:
        """Record a heartbeat."""
        self.heard_at = now
        if self.progress not in {None, progress}:
            self.got_on_at = now
        self.progress = progress


class Turns(Protocol):
    """The turns that tenants take."""

    def note_return(self, entry: Entry) -> None:
        """Note that a choice that was admitted before enters a batch again."""

    def most_tokens_of_others(self, entry: Entry) -> float:
        """The most output tokens that other tenants can have got since the first call for a choice that waits."""


class EpochWatch:
    """Follows the steps of one rank and one epoch, and raises AssertionError when one is wrong."""

    def __init__(
        self,
        rank: int,
        number: int,
        settings: CellSettings,
        live: dict[Number, Entry],
        *,
        now: float,
        waits_here: Callable[[Entry], bool],
        shares: ShareWatch | None = None,
        turns: Turns | None = None,
        has_suspects: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin with an empty batch.

        Args:
            number: The epoch.
            live: The choices that have not ended; the caller changes it.
            waits_here: Whether a choice outside the batch is queued for this rank, in queue order.
            shares: Where tenants' shares are checked.
            turns: What is known of the turns that tenants take; without it, several of them may wait for any time.
            has_suspects: Whether any request is suspected, so that a rank may compute dummies as a control.
        """
        self._has_suspects = has_suspects
        self.rank = rank
        self.number = number
        self.signs = Signs(now)
        self.in_flight: deque[SentStep] = deque()
        self.shares = shares
        self._turns = turns
        self._waits_here = waits_here
        self._settings = settings
        self._live = live
        self._batch: dict[int, Entered] = {}
        # By slot, for prompts whose chunks are not all sent: the tokens left.
        self._num_later: dict[int, int] = {}
        # By slot: the blocks that a sequence entered with, and how many of its tokens were sent for computation.
        self._prompt_blocks: dict[int, list[int]] = {}
        self._num_sent_tokens: dict[int, int] = {}
        self._num_steps = 0
        self._num_entered = 0
        # The step that first reported a sequence as not finite, by the sequence's number.
        self._reported_not_finite: dict[int, int] = {}
        self._block_to_salt: dict[int, Salt] = {}
        self._states = None if settings.num_checkpoint_slots is None else StateWatch(settings.cache.block_size)
        self._overtaken: list[Entry] = []
        # For each aged request: the requests that were ever ahead of it, and the steps sent since it aged.
        self._ahead_of: dict[Entry, set[Entry]] = {}
        self._num_steps_waited: Counter[Entry] = Counter()

    def is_overdue(self, now: float, *, silence_s: float) -> bool:
        """Whether the rank is silent or makes no progress."""
        if now - self.signs.heard_at > silence_s:
            return True
        return bool(self.in_flight) and now >= max(self.in_flight[0].sent_at, self.signs.got_on_at) + _STEP_DEADLINE_S

    def is_due(self, answer: Answer) -> bool:
        """Whether this is an answer to the oldest step in flight."""
        return bool(self.in_flight) and answer.step_id == self.in_flight[0].step.step_id

    def is_repeat(self, answer: Answer) -> bool:
        """Whether the step has been answered before."""
        return answer.step_id <= self._num_steps - len(self.in_flight)

    def check_step(self, step: Step, now: float) -> None:
        """Check a step that the engine sends."""
        settings, policy, batch = self._settings, self._settings.policy, step.batch
        self._num_steps += 1
        assert (step.epoch, step.step_id) == (self.number, self._num_steps), "a step out of order"
        assert len(self.in_flight) < policy.max_steps_in_flight, "too many steps in flight"
        victims = self._check_victims(batch)
        for slot in batch.leave_slots:
            del self._batch[slot]
            self._num_later.pop(slot, None)
        self._enter(batch, now)
        self._check_sharing(batch)
        if self._states is not None:
            self._states.check_step(batch, lambda slot: self._batch[slot].entry.text)
            waits = all(other.is_new and self._states.is_coming(other.plan) for other in self._overtaken)
            assert waits, "an older or more urgent request is overtaken that waits for no state"
            self._overtaken.clear()
        assert len(self._batch) <= settings.max_num_seqs, "too many sequences"
        chunks = [*batch.chunks, *(enter.chunk for enter in batch.enters)]
        num_prompt_tokens = sum(chunk.num_tokens for chunk in chunks)
        num_tokens, max_prompt_tokens = (
            len(batch.decode_slots) + num_prompt_tokens,
            settings.max_prompt_tokens(self.rank),
        )
        assert num_tokens == batch.num_tokens <= settings.max_step_tokens(self.rank), "more tokens than a step may have"
        assert num_prompt_tokens <= max_prompt_tokens, "more prompt tokens than a step may have"
        assert num_tokens or settings.topology.is_coupled or self._has_suspects(), "a step that computes nothing"
        assert batch.num_dummy_tokens <= min(max_prompt_tokens, settings.context_length), "a dummy that is too large"
        is_mixed = len(batch.decode_slots) > 0 and len(chunks) > 0
        assert settings.mixes(self.rank) or not is_mixed, "prompts and decodes in one step although mixing is off"
        is_whole = all(not chunk.num_later_tokens for chunk in chunks)
        assert policy.enable_chunked_prefill or is_whole, "a chunk of a prompt although chunking is off"
        for slot in [*batch.decode_slots.tolist(), *(chunk.slot for chunk in chunks)]:
            entry = self._batch[slot].entry
            assert entry.is_live, "a step computes a request that has ended"
            assert entry.deadline is None or now < entry.deadline, "a step computes a request after its deadline"
        for slot, block in zip(batch.append_slots, batch.append_block_ids, strict=True):
            self._block_to_salt[block] = self._batch[slot].entry.plan.salt
            self._batch[slot].blocks.append(block)
        rows = [self._batch[slot] for slot in batch.row_slots.tolist()]
        self._check_rows(rows)
        self._check_waiting(now)
        self._send(SentStep(step, now, rows, self._take_chunks(chunks)))
        if self.shares is not None:
            entered = [self._batch[enter.chunk.slot].claim for enter in batch.enters]
            self.shares.check_wait(self._view(), entered, victims)

    @property
    def requests(self) -> set[RequestKey]:
        """The requests in the batch or in flight that have not ended."""
        in_batch = {entered.entry for entered in self._batch.values()}
        entries = in_batch.union(*(sent.entries for sent in self.in_flight))
        return {entry.plan.key for entry in entries if entry.is_live}

    def lose(self, *, may_resume: bool = True) -> Iterator[Entry]:
        """End the epoch; returns the entries of each step in flight, once per step, including those not live.

        Args:
            may_resume: Whether sequences that it has computed are resumed elsewhere.
        """
        in_flight = [entry for sent in self.in_flight for entry in sent.entries]
        in_batch = {entered.entry for entered in self._batch.values()} if may_resume else set()
        for entry in in_batch.union(in_flight):
            # A choice that ended with this event has already reported its number of resumes.
            entry.max_resumes += entry.is_live
        for entry in set(in_flight):
            entry.min_resumes += entry.is_live
            entry.num_in_flight = 0
        return iter(in_flight)

    def take_answer(self, answer: Answer, result: StepResult) -> SentStep:
        """Remove and return the oldest step in flight, which has returned."""
        step = self.in_flight.popleft()
        if self._states is not None:
            self._states.take_answer(result)
        for entry in step.entries:
            entry.num_in_flight -= 1
        for row, spoiler in zip(result.not_finite_rows.tolist(), answer.spoilers, strict=True):
            reader = step.rows[row]
            reported_at = self._reported_not_finite.get(spoiler)
            is_spread = spoiler != reader.number and reported_at is not None and reported_at <= reader.after_step
            assert not is_spread, "KV known to be bad is shared"
            self._reported_not_finite.setdefault(reader.number, step.step.step_id)
        return step

    def _send(self, sent: SentStep) -> None:
        for entry in sent.entries:
            assert not entry.num_in_flight or entry.rank == self.rank, "a sequence is computed on two ranks"
            entry.rank = self.rank
            entry.num_in_flight += 1
        self.in_flight.append(sent)

    def _enter(self, batch: ScheduledBatch, now: float) -> None:
        for enter in batch.enters:
            entry = self._live[number_of(enter.params.seed), enter.choice]
            held = {entered.entry for entered in self._batch.values()}
            assert entry not in held, "a request enters twice"
            self._check_order(entry, held, now)
            if self._turns is not None and not entry.is_new:
                self._turns.note_return(entry)
            if entry.num_cached_tokens is None:
                entry.num_cached_tokens = enter.num_cached_tokens
            asks = enter.params.options is not None and enter.params.options.num_prompt_logprobs is not None
            is_scored = entry.plan.options.num_prompt_logprobs is not None and not (entry.choice or entry.num_tokens)
            assert asks == is_scored, "a prompt's log-probabilities are requested twice, or never"
            num_shared = enter.num_cached_tokens // self._settings.cache.block_size
            salt = entry.plan.salt
            is_own = all(self._block_to_salt.get(block) == salt for block in unpack(enter.block_bytes)[:num_shared])
            assert is_own, "a shared prefix was not computed under this salt in this epoch"
            self._block_to_salt.update(dict.fromkeys(unpack(enter.block_bytes), salt))
            after_step = self._num_steps - 1 - len(self.in_flight)
            self._batch[enter.chunk.slot] = Entered(
                entry, self._num_entered, after_step, is_scored, unpack(enter.block_bytes), entry.num_tokens
            )
            self._num_entered += 1
            self._prompt_blocks[enter.chunk.slot] = unpack(enter.block_bytes)
            self._num_sent_tokens[enter.chunk.slot] = enter.num_cached_tokens

    def _check_victims(self, batch: ScheduledBatch) -> int:
        """Check which tenants' sequences make way with a step; returns how many do."""
        if self.shares is None:
            return 0
        left = {self._batch[slot] for slot in batch.leave_slots}
        victims = [entered.claim for entered in left if self._runs(entered)]
        if victims:
            self.shares.check_victims(self._view(), victims)
        return len(victims)

    def _view(self) -> RankView:
        """The rank before a step that is about to be sent, or after the last one that was sent."""
        batch = sorted(self._batch.values(), key=lambda entered: entered.number)
        running = [entered for entered in batch if self._runs(entered)]
        in_flight = set[Entered]().union(*(sent.sequences for sent in self.in_flight))
        others = in_flight.union(batch).difference(running)
        busy = {entered.entry for entered in (*running, *others)}
        waiting = [entry for entry in self._live.values() if entry not in busy and self._waits_here(entry)]
        return RankView(
            [entered.claim for entered in running],
            [entered.claim for entered in others],
            [entry.claim(self._settings.cache.block_size) for entry in waiting],
            sum(self._num_later.values()),
        )

    def _runs(self, entered: Entered) -> bool:
        """Whether it is to get more tokens than those in flight."""
        entry = entered.entry
        num_coming = sum(entered in sent.rows for sent in self.in_flight)
        return entry.is_live and entry.num_tokens + num_coming < entry.plan.params.max_tokens

    def _check_sharing(self, batch: ScheduledBatch) -> None:
        """Check that no prefix is shared if caching is off, and none that the same step computes if that is off."""
        block_size = self._settings.cache.block_size
        computed: set[int] = set()
        for chunk in [*batch.chunks, *(enter.chunk for enter in batch.enters)]:
            start = self._num_sent_tokens[chunk.slot]
            end = self._num_sent_tokens[chunk.slot] = start + chunk.num_tokens
            computed.update(self._prompt_blocks[chunk.slot][start // block_size : -(-end // block_size)])
        for enter in batch.enters:
            shared = unpack(enter.block_bytes)[: enter.num_cached_tokens // block_size]
            assert self._settings.cache.enable_prefix_caching or not shared, (
                "a prefix is shared although caching is off"
            )
            has_state = self._settings.num_checkpoint_slots is not None
            may_share = self._settings.policy.share_in_step and not has_state
            is_computed_before = may_share or computed.isdisjoint(shared)
            assert is_computed_before, "a prefix is shared in the step that computes it"

    def _take_chunks(self, chunks: list[PrefillChunk]) -> list[tuple[Entered, int]]:
        """Record how far each prompt is computed with this step."""
        taken = []
        for chunk in chunks:
            entered = self._batch[chunk.slot]
            self._num_later[chunk.slot] = chunk.num_later_tokens
            # Tokens after the prompt were computed before the sequence was preempted.
            taken.append((entered, len(entered.entry.plan.prompt) - chunk.num_later_tokens))
        begun = Counter(self._batch[slot].entry.plan.tenant.name for slot, num in self._num_later.items() if num)
        # A chunk that ends where a state is saved may leave room for other prompts.
        assert self._settings.num_checkpoint_slots or max(begun.values(), default=0) <= 1, (
            "two prompts of a tenant are partly computed at a time"
        )
        return taken

    def _check_rows(self, rows: list[Entered]) -> None:
        """Check that rows in flight cannot give a request more than `max_tokens`."""
        coming = Counter(entered.entry for sent in self.in_flight for entered in sent.rows)
        for entered in rows:
            entry = entered.entry
            num_tokens = entry.num_tokens + coming[entry] + 1
            assert num_tokens <= entry.plan.params.max_tokens, "a row after the last token"

    def _check_order(self, entry: Entry, held: set[Entry], now: float) -> None:
        policy = self._settings.policy
        # A choice whose last rows are in flight has already left the batch.
        busy = held.union(entered.entry for sent in self.in_flight for entered in sent.rows)
        has_several_tenants = len({other.plan.tenant for other in self._live.values()}) > 1
        for other in self._live.values():
            if other in busy or not self._waits_here(other):
                continue
            if has_several_tenants and other.is_new and not entry.is_new:
                # What was admitted before goes first, while its tenant keeps its share.
                continue
            if other.plan.tenant != entry.plan.tenant:
                # Tenants take turns by what they were given.
                continue
            assert not self._has_aged(other, now) or other.arrived_at >= entry.arrived_at, "a request starves"
            if now - entry.taken_in_at > policy.max_age_s:
                continue
            match policy.queue_policy:
                case QueuePolicy.FCFS:
                    is_later = other.arrived_at >= entry.arrived_at
                case QueuePolicy.PRIORITY:
                    is_later = (other.plan.priority, other.arrived_at) >= (entry.plan.priority, entry.arrived_at)
                case QueuePolicy.LONGEST_PREFIX:
                    is_later = True
            assert is_later or self._states is not None, "an older or more urgent request is overtaken"
            if not is_later:
                # It may wait for a state that this step saves.
                self._overtaken.append(other)

    def _check_waiting(self, now: float) -> None:
        policy = self._settings.policy
        if policy.delay_factor:
            # The bound does not hold when admission is delayed.
            return
        has_several_tenants = len({entry.plan.tenant for entry in self._live.values()}) > 1
        if has_several_tenants and self._turns is None:
            return
        for entry in self._live.values():
            if not self._has_aged(entry, now) or not self._waits_here(entry):
                continue
            ahead = self._ahead_of.setdefault(entry, {entered.entry for entered in self._batch.values()})
            # Choices of a request arrive together.
            ahead.update(other for other in self._live.values() if other.arrived_at <= entry.arrived_at)
            num_others_tokens = 0.0
            if self._turns is not None:
                ahead = {other for other in ahead if other.plan.tenant == entry.plan.tenant}
                num_others_tokens = self._turns.most_tokens_of_others(entry)
            self._num_steps_waited[entry] += 1
            settings = self._settings
            # A token of another tenant is a step with a row, which counts as one of a request that is ahead.
            bound = math.ceil(num_others_tokens) * self._max_steps_per_token + max_steps_to_admission(
                len(ahead),
                settings.max_request_tokens,
                settings.max_prompt_tokens(self.rank),
                settings.max_save_points,
            )
            # Coupled ranks delay their prompts for each other.
            bound *= 1 + policy.max_prefill_wait_steps
            assert self._num_steps_waited[entry] <= bound, "a request waits longer than it may"

    @property
    def _max_steps_per_token(self) -> int:
        """How many steps there are at most for one with a row."""
        settings = self._settings
        num_chunks = -(-settings.max_request_tokens // settings.max_prompt_tokens(self.rank))
        return 2 * (num_chunks + settings.max_save_points) - 1

    def _has_aged(self, entry: Entry, now: float) -> bool:
        """Whether a request has certainly aged: it never entered a batch, and was accepted long enough ago."""
        return entry.num_cached_tokens is None and now - entry.taken_in_at > self._settings.policy.max_age_s
