"""How sequences end."""

from __future__ import annotations

from services.scheduler.core.batch.sequence import Finish, FinishReason, Numerics, Sequence, SequenceStatus
from services.scheduler.core.planning.preemption import Preemption
from services.scheduler.core.policy import SchedulerCounters
from services.scheduler.core.queue.waiting_queue import WaitingQueue
from services.scheduler.core.results.outputs import OutputsByClient, RequestEnd
from services.scheduler.core.running_batch import RunningBatch
from services.scheduler.core.stops import find_finish
from services.scheduler.core.worker_facts import WorkerFacts
from shared.errors import ServiceError


class Endings:
    """Ends sequences in any state; their last step in flight frees their slots and blocks."""

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningBatch,
        preemption: Preemption,
        facts: WorkerFacts,
        counters: SchedulerCounters,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._slots = running.slots
        self._preemption = preemption
        self._eos_token_ids = frozenset(facts.eos_token_ids)
        # None where nothing is computed: in the unplaced queue.
        self._numerics = Numerics(facts.numerics_fingerprint, facts.is_exact) if facts.num_blocks else None
        self._counters = counters

    def stop_at(self, seq: Sequence, num_completion_tokens: int, now: float) -> RequestEnd:
        """End a sequence at a stop string; later tokens are discarded."""
        if seq.slot is not None:
            self._running.store(seq)
        num_known = seq.num_stored_tokens - seq.num_prompt_tokens
        return self.finish(
            seq, Finish(FinishReason.STOP_STRING), now, num_completion_tokens=min(num_completion_tokens, num_known)
        )

    def finish(self, seq: Sequence, finish: Finish, now: float, num_completion_tokens: int | None = None) -> RequestEnd:
        """End a sequence whose tokens are stored; by default with all of them."""
        if num_completion_tokens is None:
            num_completion_tokens = seq.num_stored_tokens - seq.num_prompt_tokens
        seq.finish = finish
        self._leave(seq, now, SequenceStatus.FINISHED)
        return RequestEnd(
            seq.handle,
            num_completion_tokens,
            finish,
            num_resumes=seq.num_resumes,
            is_resume_exact=seq.numerics is None or seq.numerics.is_continued_by(self._numerics or seq.numerics),
            queue_s=seq.waited_s,
        )

    def abort(self, seq: Sequence, now: float) -> None:
        """Discard a sequence."""
        if seq.slot is not None:
            self._running.store(seq)
        self._leave(seq, now, SequenceStatus.EXIT_ENGINE)

    def end_if_stopped(self, seq: Sequence, outputs: OutputsByClient, now: float) -> None:
        """End a sequence if its newest token makes it stop."""
        self._running.store(seq)
        finish = find_finish(seq, self._eos_token_ids)
        if finish is not None:
            outputs.add_end(seq.client, self.finish(seq, finish, now))

    def ends_at(self, seq: Sequence, num_tokens: int, outputs: OutputsByClient, now: float) -> bool:
        """End a sequence if it stops with its first `num_tokens` tokens, dropping the rest."""
        assert seq.slot is not None
        slot, num_known = seq.slot, self._slots.num_tokens[seq.slot]
        self._slots.num_tokens[slot] = num_tokens
        self.end_if_stopped(seq, outputs, now)
        if seq.finish is None:
            self._slots.num_tokens[slot] = num_known
        return seq.finish is not None

    def fail(self, seq: Sequence, error: ServiceError, outputs: OutputsByClient, now: float) -> None:
        """Fail a sequence that has a slot."""
        self._slots.flush(seq)
        self._leave(seq, now, SequenceStatus.EXIT_ENGINE)
        outputs.add_end(seq.client, RequestEnd.failure(seq, error))

    def _leave(self, seq: Sequence, now: float, status: SequenceStatus) -> None:
        """Take out a sequence in any state; its tokens must be stored."""
        self._counters.num_finished += 1
        seq.left_at = now
        if seq.slot is None:
            self._waiting.remove(seq, now)
        elif seq.status is SequenceStatus.WAITING:
            self._preemption.drop_parked(seq)
        elif not seq.is_retiring:
            self._running.drop(seq)
        self._waiting.tenants.note_end(seq)
        seq.status = status
        if seq.slot is not None:
            self._slots.end(seq.slot)
