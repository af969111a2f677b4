"""Which prompts the next step computes: the waiting queue, and prompts that are computed in chunks."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.batch import EnteringSequence, PrefillChunk
from services.scheduler.policy import SchedulerCounters, SchedulerPolicy
from services.scheduler.running_batch import RunningBatch
from services.scheduler.sequence import TOKEN_BYTES, Sequence, SequenceType
from services.scheduler.stops import watched_tokens
from services.scheduler.waiting_queue import WaitingQueue


@dataclass(slots=True)
class Prefill:
    """What a step computes of prompts: next chunks first, then sequences that enter. `budget` is what is left."""

    budget: int
    chunks: list[PrefillChunk]
    enters: list[EnteringSequence]

    @property
    def is_empty(self) -> bool:
        """Whether no token of a prompt is computed."""
        return not self.chunks and not self.enters


class PrefillPlanner:
    """Owns the waiting queue and the prompts that have begun.

    Invariant: `begun` are the running sequences whose prompt is not sent completely, in the order of their entry.
    Their next chunks precede every waiting sequence.
    """

    def __init__(
        self,
        policy: SchedulerPolicy,
        running: RunningBatch,
        eos_token_ids: frozenset[int],
        counters: SchedulerCounters,
    ) -> None:
        self.waiting = WaitingQueue(policy.max_waiting_requests, policy.max_waiting_tokens)
        self.begun: list[Sequence] = []
        self._policy = policy
        self._running = running
        self._blocks = running.blocks
        self._slots = running.slots
        self._eos_token_ids = eos_token_ids
        self._counters = counters

    def plan(self, budget: int, now: float, *, may_admit: bool) -> Prefill:
        """Take the next chunks of prompts that have begun, then admit waiting sequences, within `budget` tokens."""
        prefill = Prefill(max(budget, 0), [], [])
        for seq in list(self.begun):
            if prefill.budget:
                self._send_chunk(seq, prefill)
        # A slot that a step in flight still names is a place that is taken.
        while may_admit and self.waiting and self._slots.num_free_slots:
            if not self._try_admit(prefill, now):
                break
        return prefill

    def _send_chunk(self, seq: Sequence, prefill: Prefill) -> None:
        token_bytes = self._take_tokens(seq, min(seq.num_unsent_tokens, prefill.budget), prefill)
        assert seq.slot is not None
        if not seq.num_unsent_tokens:
            self.begun.remove(seq)
            self._slots.is_prefilling[seq.slot] = False
        prefill.chunks.append(PrefillChunk(seq.slot, token_bytes, seq.num_unsent_tokens))

    def _try_admit(self, prefill: Prefill, now: float) -> bool:
        """Let the next sequence enter with as many tokens as may be; when it returns False, nothing has changed."""
        seq = self.waiting.first
        prefix = self._blocks.find_prefix(seq)
        num_new_tokens = seq.num_stored_tokens - prefix.num_tokens
        num_tokens = self._num_tokens_to_send(num_new_tokens, prefill.budget)
        if not num_tokens or not self._blocks.try_allocate(seq, prefix):
            return False
        self.waiting.pop_first(now)
        seq.num_unsent_tokens = num_new_tokens
        token_bytes = self._take_tokens(seq, num_tokens, prefill)
        slot = self._running.enter(seq, watched_tokens(seq.params, self._eos_token_ids))
        if seq.num_unsent_tokens:
            self.begun.append(seq)
        if seq.num_first_cached_tokens is None:
            seq.num_first_cached_tokens = prefix.num_tokens
        self._counters.num_prefix_queried_tokens += seq.num_stored_tokens
        self._counters.num_prefix_hit_tokens += prefix.num_tokens
        prefill.enters.append(
            EnteringSequence(
                PrefillChunk(slot, token_bytes, seq.num_unsent_tokens),
                prefix.num_tokens,
                seq.num_prompt_tokens,
                list(seq.block_table),
                seq.params,
            )
        )
        return True

    def _num_tokens_to_send(self, num_new_tokens: int, budget: int) -> int:
        """How many of a waiting sequence's new tokens go with this step; 0 when it waits for another one."""
        if num_new_tokens <= budget:
            return num_new_tokens
        fits_no_step = num_new_tokens > self._policy.max_num_batched_tokens
        may_chunk = self._policy.enable_chunked_prefill and (fits_no_step or self._policy.enable_mixed_steps)
        return budget if may_chunk else 0

    def _take_tokens(self, seq: Sequence, num_tokens: int, prefill: Prefill) -> bytes:
        """The next unsent tokens, which now count as sent; full blocks can be found from here on."""
        start = seq.num_stored_tokens - seq.num_unsent_tokens
        seq.num_unsent_tokens -= num_tokens
        prefill.budget -= num_tokens
        self._blocks.publish(seq, start + num_tokens)
        seq.type = SequenceType.PREFILL if seq.num_unsent_tokens else SequenceType.DECODE
        return bytes(seq.token_bytes[start * TOKEN_BYTES : (start + num_tokens) * TOKEN_BYTES])
