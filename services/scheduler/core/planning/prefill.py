"""Decides which prompts the next step computes."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.core.admission import AdmissionPolicy, NewTokenRatio
from services.scheduler.core.batch.sequence import TOKEN_BYTES, Sequence, SequenceType
from services.scheduler.core.cache.cached_prefix import BlockIds, CachedPrefix
from services.scheduler.core.planning.shares import Shares
from services.scheduler.core.policy import SchedulerCounters, SchedulerPolicy, StepBudget
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from services.scheduler.core.running_batch import RunningBatch
from services.scheduler.core.stops import watched_tokens
from services.scheduler.core.worker_facts import WorkerFacts
from shared.ids import Slot
from shared.request.sampling_params import SamplingParams
from shared.step.step import EnteringSequence, PrefillChunk


@dataclass(slots=True)
class Prefill:
    """The prompt part of a step's plan."""

    budget: int = 0
    """Tokens that the step can still take."""
    chunks: list[PrefillChunk] = field(default_factory=list)
    enters: list[EnteringSequence] = field(default_factory=list)
    state_saves: list[tuple[int, int]] = field(default_factory=list)
    state_restores: list[tuple[int, int]] = field(default_factory=list)
    computed_blocks: set[int] = field(default_factory=set)
    """Full blocks that the step computes; recorded only where steps do not share them."""

    @property
    def is_empty(self) -> bool:
        """Whether no prompt token is computed."""
        return not self.chunks and not self.enters

    def computes_any(self, blocks: BlockIds) -> bool:
        """Whether any of these blocks is in `computed_blocks`."""
        return bool(self.computed_blocks) and not self.computed_blocks.isdisjoint(blocks.tolist())


class PrefillPlanner:
    """Plans further chunks of prompts that have begun, then admits waiting sequences.

    A block that a step computes can be shared by sequences that enter with the same step, because a layer writes all
    keys and values before it attends. With `share_in_step` off, they wait for the next step, as they do where the model
    has recurrent state, which the step has only at its end.

    No sequence is admitted while part of a prompt of its tenant is still to be sent. So the first choice of a request
    computes the prompt, and the others find its full blocks, even if it is preempted, ends or fails. Between tenants
    the budget goes by their counters, step by step: the next sequence of one that has got no more than another enters
    before the other's prompt goes on, which may take many steps.

    With recurrent states, a chunk may end before the budget does, and then others enter beside it. A sequence that
    could share more once a step in flight has saved a state waits until that step has returned, the save is withdrawn,
    or the rank is lost. Others pass it meanwhile, unless it has aged or was admitted before.
    """

    def __init__(
        self,
        policy: SchedulerPolicy,
        running: RunningBatch,
        shares: Shares,
        new_token_ratio: NewTokenRatio,
        facts: WorkerFacts,
        counters: SchedulerCounters,
    ) -> None:
        self._new_token_ratio = new_token_ratio
        self._policy = policy
        self._budget = StepBudget.of(policy, facts)
        self._waiting = shares.waiting
        self._tenants = shares.waiting.tenants
        self._has_classes = policy.queue_policy is QueuePolicy.PRIORITY
        self._running = running
        self._shares = shares
        self._blocks = running.blocks
        self._slots = running.slots
        self._facts = facts
        self._shares_in_step = policy.share_in_step and not facts.has_recurrent_state
        self._eos_token_ids = frozenset(facts.eos_token_ids)
        self._counters = counters
        self._states = running.states
        self._num_times_saves_ended = 0

    def bring_back(self, now: float) -> None:
        """Let those that others may pass have another look, if what they wait for has come, or if they have aged."""
        if self._blocks.num_times_saves_ended != self._num_times_saves_ended:
            self._num_times_saves_ended = self._blocks.num_times_saves_ended
            self._waiting.bring_back()
        self._waiting.bring_back_aged(now)

    def choose_again(self) -> None:
        """Let the next waiting sequence be chosen anew if a prompt has begun: what that has taken meanwhile counts."""
        if self._running.begun:
            self._waiting.choose_again()

    def plan(self, budget: int, now: float, *, may_admit: bool) -> Prefill:
        """Plan chunks, then admit, within `budget` tokens."""
        prefill = Prefill(max(budget, 0))
        for seq in sorted(self._running.begun, key=self._counter_of):
            while may_admit and self._is_next_before(seq, now):
                if not self._try_admit_one(prefill, now):
                    break
            if prefill.budget:
                self._send_chunk(seq, prefill)
        while may_admit and self._try_admit_one(prefill, now):
            pass
        return prefill

    def next_waiting(self, now: float) -> tuple[Sequence, int] | None:
        """The next waiting sequence and how many free blocks it needs.

        None if there is none, or if it waits for a step in flight and may not be passed.
        """
        seq = self._next(now)
        return None if seq is None else (seq, self.num_blocks_to_take(seq))

    def num_blocks_to_take(self, seq: Sequence) -> int:
        """How many free blocks a waiting sequence needs."""
        return self._blocks.num_blocks_to_take(seq, self._find_prefix(seq))

    def _counter_of(self, seq: Sequence) -> float:
        return self._tenants[seq.tenant_number].counter

    def _is_next_before(self, begun: Sequence, now: float) -> bool:
        """Whether the next waiting sequence goes before a prompt that has begun: one of a tenant without any."""
        if not self._tenants.are_shared or not self._waiting.num_next:
            return False
        seq = self._next(now)
        if seq is None or any(other.tenant_number == seq.tenant_number for other in self._running.begun):
            return False
        if self._has_classes and seq.priority > begun.priority:
            return False
        return self._counter_of(seq) <= self._counter_of(begun)

    def _next(self, now: float) -> Sequence | None:
        while self._waiting.num_next:
            seq = self._waiting.next(now, self._blocks.num_cached_tokens, self._shares.keeps_share)
            if self._states is None or not self._find_prefix(seq).awaits_state:
                return seq
            if not self._waiting.try_set_aside(seq, now):
                break
        return None

    def _send_chunk(self, seq: Sequence, prefill: Prefill) -> None:
        num_tokens = min(seq.num_unsent_tokens, prefill.budget)
        if self._states is not None:
            num_tokens = self._states.cut(seq, seq.num_stored_tokens - seq.num_unsent_tokens, num_tokens)
        token_bytes = self._take_tokens(seq, num_tokens, prefill)
        assert seq.slot is not None
        self._save_state(seq, prefill)
        if not seq.num_unsent_tokens:
            self._running.begun.remove(seq)
            self._slots.is_prefilling[seq.slot] = False
        prefill.chunks.append(PrefillChunk(seq.slot, token_bytes, seq.num_unsent_tokens))

    def _try_admit_one(self, prefill: Prefill, now: float) -> bool:
        """Admit the next waiting sequence if there is room; returns False if nothing has changed."""
        # Slots that a step in flight still names are not free.
        return bool(prefill.budget and self._slots.num_free_slots) and self._try_admit(prefill, now)

    def _try_admit(self, prefill: Prefill, now: float) -> bool:
        seq = self._next(now)
        if seq is None:
            return False
        prefix = self._find_prefix(seq)
        num_new_tokens = seq.num_stored_tokens - prefix.num_tokens
        num_tokens = self._num_tokens_to_send(num_new_tokens, prefill.budget)
        if not num_tokens or prefill.computes_any(prefix.block_ids):
            return False
        if not self._growth_fits(seq, prefix) or not self._blocks.try_allocate(seq, prefix):
            return False
        if self._states is not None:
            self._states.begin(seq, prefix)
            num_tokens = self._states.cut(seq, prefix.num_tokens, num_tokens)
        self._waiting.take(seq, now)
        if seq.has_prompt_logprobs and not seq.wants_prompt_logprobs:
            # Its client already has them, or gets them with choice 0.
            seq.drop_prompt_logprobs()
        seq.num_unsent_tokens = num_new_tokens
        if seq.pays_again or not seq.was_admitted:
            seq.num_unpaid_tokens = num_new_tokens
            seq.pays_again = False
        token_bytes = self._take_tokens(seq, num_tokens, prefill)
        slot = self._running.enter(seq, watched_tokens(seq.params, self._eos_token_ids))
        if prefix.checkpoint is not None:
            # Before anything is saved, which may evict others.
            self._blocks.restore_state(prefix.checkpoint)
            prefill.state_restores.append((slot, prefix.checkpoint))
        self._save_state(seq, prefill)
        seq.note_admission(prefix.num_tokens)
        if self._shares.holdings is not None:
            self._shares.note_admission(seq)
        self._counters.num_prefix_queried_tokens += seq.num_stored_tokens
        self._counters.num_prefix_hit_tokens += prefix.num_tokens
        self._counters.num_prefix_tokens_lost_to_state += prefix.num_lost_tokens
        chunk = PrefillChunk(Slot(slot), token_bytes, seq.num_unsent_tokens)
        prefill.enters.append(self._entering(seq, chunk, prefix.num_tokens))
        return True

    def _save_state(self, seq: Sequence, prefill: Prefill) -> None:
        """Save the state after the tokens that were just taken, if it is to be."""
        if self._states is not None:
            prefill.state_saves += self._states.save_prompt(seq, seq.num_stored_tokens - seq.num_unsent_tokens)

    def _find_prefix(self, seq: Sequence) -> CachedPrefix:
        """Empty if all of the prompt must be computed."""
        if seq.reads_whole_prompt:
            return self._blocks.no_prefix(seq)
        return self._blocks.find_prefix(seq)

    def _entering(self, seq: Sequence, chunk: PrefillChunk, num_cached_tokens: int) -> EnteringSequence:
        options = seq.params.options
        needs_all_tokens = self._facts.needs_all_tokens or (options is not None and options.needs_all_tokens)
        return EnteringSequence(
            chunk,
            num_cached_tokens,
            seq.num_prompt_tokens,
            seq.block_table.tobytes(),
            seq.params,
            seq.choice,
            stop_token_ids=self._stop_token_ids(seq.params) if options is not None and options.min_tokens else (),
            cached_token_bytes=bytes(seq.token_bytes[: num_cached_tokens * TOKEN_BYTES]) if needs_all_tokens else b"",
        )

    def _stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        eos_token_ids = frozenset() if params.ignore_eos else self._eos_token_ids
        return tuple(sorted(eos_token_ids.union(params.stop_token_ids)))

    def _growth_fits(self, seq: Sequence, prefix: CachedPrefix) -> bool:
        """Whether the admission policy expects no retraction with `seq` running too.

        What others have made way for enters in any case, or its room would be kept for nothing. What a tenant above
        its share may grow into keeps no other one from its own share.
        """
        is_plain = self._policy.admission_policy is AdmissionPolicy.PLAIN
        if is_plain or seq is self._waiting.held or not self._running.order.size:
            return True
        if self._waiting.tenants.are_shared and self._shares.is_due(seq):
            return True
        num_tokens, max_num_tokens = self._running.progress()
        return self._new_token_ratio.fits(
            num_free_tokens=self._blocks.num_free_blocks * self._blocks.block_size,
            num_needed_tokens=self._blocks.num_blocks_to_take(seq, prefix) * self._blocks.block_size,
            num_remaining_tokens=max_num_tokens - num_tokens + seq.max_num_tokens - seq.num_stored_tokens,
        )

    def _num_tokens_to_send(self, num_new_tokens: int, budget: int) -> int:
        """0 when the sequence waits for another step."""
        if num_new_tokens <= budget:
            return num_new_tokens
        fits_no_step = num_new_tokens > self._budget.max_prompt_tokens
        may_chunk = self._policy.enable_chunked_prefill and (fits_no_step or self._budget.mixes)
        return budget if may_chunk else 0

    def _take_tokens(self, seq: Sequence, num_tokens: int, prefill: Prefill) -> bytes:
        """Count the next unsent tokens as sent, charge them, and publish their full blocks."""
        start = seq.num_stored_tokens - seq.num_unsent_tokens
        end = start + num_tokens
        seq.num_unsent_tokens -= num_tokens
        prefill.budget -= num_tokens
        num_to_pay = min(num_tokens, seq.num_unpaid_tokens)
        seq.num_unpaid_tokens -= num_to_pay
        if num_to_pay and self._tenants.are_shared:
            self._tenants.charge_prompt(seq.tenant_number, num_to_pay)
        self._blocks.publish(seq, end)
        if not self._shares_in_step:
            block_size = self._blocks.block_size
            prefill.computed_blocks.update(seq.block_table[start // block_size : end // block_size])
        seq.type = SequenceType.PREFILL if seq.num_unsent_tokens else SequenceType.DECODE
        return bytes(memoryview(seq.token_bytes)[start * TOKEN_BYTES : end * TOKEN_BYTES])
