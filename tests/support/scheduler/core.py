"""The scheduler's core without an engine: its parts, sequences for them, and results of their steps."""

from __future__ import annotations

import numpy as np

from services.scheduler.core.admission import NewTokenRatio
from services.scheduler.core.batch.sequence import Priority, Sequence
from services.scheduler.core.batch.step import ScheduledBatch, StepRecord
from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.planning.assemble import assemble
from services.scheduler.core.planning.decode import DecodePlanner, Decodes
from services.scheduler.core.planning.kept_room import KeptRoom
from services.scheduler.core.planning.preemption import Preemption
from services.scheduler.core.planning.prefill import Prefill, PrefillPlanner
from services.scheduler.core.planning.shares import Shares
from services.scheduler.core.policy import CacheSettings, SchedulerCounters, SchedulerPolicy
from services.scheduler.core.queue.waiting_queue import WaitingQueue
from services.scheduler.core.results.endings import Endings
from services.scheduler.core.results.outputs import OutputsByClient, RequestEnd
from services.scheduler.core.results.postprocess import Postprocessor
from services.scheduler.core.running_batch import RunningBatch
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step_deadline import StepDeadline
from services.scheduler.core.worker_facts import WorkerFacts
from shared.ids import RequestHandle
from shared.request.limits import TOKEN_DTYPE
from shared.request.sampling_params import SamplingOptions, SamplingParams
from shared.step.step import StepResult
from tests.support.scheduler.engine_driver import rows_of, token_bytes, worker_facts

Row = int | list[int]
"""The only token of a row, or its run of tokens."""


def make_sequence(
    handle: int,
    prompt: int | list[int],
    *,
    client: int = 1,
    arrived_at: float = 0.0,
    choice: int = 0,
    priority: Priority = Priority.NORMAL,
    max_tokens: int = 100,
    options: SamplingOptions | None = None,
    **params: object,
) -> Sequence:
    """A new sequence with the id `r<handle>`; a number stands for that many tokens, other ones for each handle."""
    token_ids = [1000 * handle + index for index in range(prompt)] if isinstance(prompt, int) else prompt
    return Sequence(
        f"r{handle}",
        client,
        RequestHandle(handle),
        SamplingParams(max_tokens, options=options, **params),  # type: ignore[arg-type]
        bytearray(token_bytes(token_ids)),
        len(token_ids),
        arrived_at,
        choice=choice,
        priority=priority,
    )


def prompt_of(seq: Sequence) -> list[int]:
    """The tokens of its prompt."""
    token_ids: list[int] = np.frombuffer(bytes(seq.token_bytes), TOKEN_DTYPE)[: seq.num_prompt_tokens].tolist()
    return token_ids


def completion_of(seq: Sequence) -> list[int]:
    """The stored completion tokens."""
    token_ids: list[int] = np.frombuffer(bytes(seq.token_bytes), TOKEN_DTYPE)[seq.num_prompt_tokens :].tolist()
    return token_ids


def result_of(
    record: StepRecord,
    *rows: Row,
    not_finite: tuple[int, ...] = (),
    failed_grammar: tuple[int, ...] = (),
    **fields: object,
) -> StepResult:
    """The result of a step, row by row; with a run of tokens for any row, every row is counted."""
    runs = [[row] if isinstance(row, int) else row for row in rows]
    counts = None if all(isinstance(row, int) for row in rows) else np.array([len(run) for run in runs], np.int32)
    return StepResult(
        1,
        record.step_id,
        np.array([token_id for run in runs for token_id in run], TOKEN_DTYPE),
        np.array(not_finite, np.int32),
        counts=counts,
        failed_grammar_rows=np.array(failed_grammar, np.int32),
        **fields,  # type: ignore[arg-type]
    )


def rows_for(outputs: OutputsByClient, client: int = 1) -> list[tuple[int, int, list[int]]]:
    """A client's rows as (handle, index of the first token, tokens)."""
    return list(rows_of(outputs.by_client[client])) if client in outputs.by_client else []


def ends_of(outputs: OutputsByClient, client: int = 1) -> list[RequestEnd]:
    """A client's ends."""
    return outputs.by_client[client].ends if client in outputs.by_client else []


def make_scheduler(
    policy: SchedulerPolicy | None = None, *, facts: WorkerFacts | None = None, enable_prefix_caching: bool = True
) -> Scheduler:
    """A scheduler with a worker of 64 blocks of 16 tokens, unless `facts` say otherwise."""
    cache = CacheSettings(16, enable_prefix_caching)
    scheduler = Scheduler(policy or SchedulerPolicy(), cache, SchedulerCounters())
    scheduler.begin_epoch(facts or worker_facts())
    return scheduler


def add(scheduler: Scheduler, *seqs: Sequence) -> None:
    """Queue sequences, each at its arrival."""
    for seq in seqs:
        scheduler.add(seq, seq.arrived_at)


def send(scheduler: Scheduler, now: float = 0.0) -> ScheduledBatch:
    """Schedule a step, which must be possible; returns its plan."""
    scheduled = scheduler.schedule(now)
    assert scheduled is not None
    scheduler.check_integrity()
    return scheduled[1]


def give(scheduler: Scheduler, *rows: Row, now: float = 0.0) -> OutputsByClient:
    """Give the oldest step in flight its tokens."""
    assert scheduler.oldest_in_flight is not None
    outputs = scheduler.postprocess(result_of(scheduler.oldest_in_flight, *rows), now)
    scheduler.check_integrity()
    return outputs


class Parts:
    """The parts of a scheduler, wired as `Scheduler` wires them; every method checks their integrity."""

    def __init__(
        self,
        policy: SchedulerPolicy | None = None,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        facts: WorkerFacts | None = None,
    ) -> None:
        policy = policy or SchedulerPolicy(max_num_seqs=8)
        facts = facts or worker_facts(num_blocks=num_blocks)
        self.counters = SchedulerCounters()
        self.ratio = NewTokenRatio()
        self.waiting = WaitingQueue(policy.queue_policy, policy.max_age_s)
        self.blocks = BlockManager(facts.num_blocks, block_size)
        self.running = RunningBatch(policy.max_num_seqs, self.blocks, facts.num_draft_tokens)
        self.shares = Shares(policy.max_num_seqs, self.waiting, self.running)
        self.preemption = Preemption(policy, self.waiting, self.running, self.shares, self.ratio, self.counters)
        self.prefill = PrefillPlanner(policy, self.running, self.shares, self.ratio, facts, self.counters)
        kept_room = KeptRoom(self.waiting, self.running, self.prefill.num_blocks_to_take)
        self.decode = DecodePlanner(self.running, self.preemption, kept_room)
        self.deadline = StepDeadline(self.running.in_flight)
        self.endings = Endings(self.waiting, self.running, self.preemption, facts, self.counters)
        self.postprocessor = Postprocessor(
            self.running,
            self.preemption,
            self.deadline,
            endings=self.endings,
            tenants=self.waiting.tenants,
            counters=self.counters,
        )

    def add(self, *seqs: Sequence) -> None:
        """Queue sequences, each at its arrival."""
        for seq in seqs:
            self.waiting.add(seq, seq.arrived_at)

    def plan_prefill(self, budget: int = 1000, *, may_admit: bool = True, now: float = 0.0) -> Prefill:
        """Plan the prompt part of a step, and do not send it."""
        prefill = self.prefill.plan(budget, now, may_admit=may_admit)
        self._check()
        return prefill

    def plan_decode(self, now: float = 0.0) -> Decodes:
        """Plan the decodes of a step, and do not send them."""
        decodes = self.decode.plan(now)
        self._check()
        return decodes

    def send_prefill(self, *seqs: Sequence, now: float = 0.0) -> None:
        """Queue sequences, and send the prompts of all that fit."""
        self.add(*seqs)
        self.send(Decodes(), self.plan_prefill(now=now), now=now)

    def send_decode(self, now: float = 0.0) -> Decodes:
        """Send a decode step; returns its plan."""
        decodes = self.plan_decode(now)
        self.send(decodes, now=now)
        return decodes

    def send(self, decodes: Decodes, prefill: Prefill | None = None, *, now: float = 0.0) -> None:
        """Send a step."""
        batch = assemble(self.running.take_leave_slots(), decodes, prefill or Prefill())
        self.running.commit(batch, now)
        self._check()

    def give(
        self,
        *rows: Row,
        now: float = 0.0,
        not_finite: tuple[int, ...] = (),
        failed_grammar: tuple[int, ...] = (),
        **fields: object,
    ) -> OutputsByClient:
        """Give the oldest step in flight its tokens; see `result_of`."""
        record = self.running.in_flight[0]
        result = result_of(record, *rows, not_finite=not_finite, failed_grammar=failed_grammar, **fields)
        outputs = self.postprocessor.postprocess(result, now)
        self._check()
        return outputs

    def start(self, *seqs: Sequence) -> None:
        """Send the prompts of sequences, and give them their first tokens: 500 and the handle."""
        self.send_prefill(*seqs)
        self.give(*(500 + seq.handle for seq in seqs))

    def run_decode(self, *rows: Row) -> OutputsByClient:
        """Send a decode step, and give it its tokens."""
        self.send_decode()
        return self.give(*rows)

    def num_cached_tokens(self, token_ids: list[int]) -> int:
        """How many tokens a new sequence with this prompt would find cached."""
        return self.blocks.num_cached_tokens(make_sequence(999, token_ids))

    def _check(self) -> None:
        self.waiting.check_integrity()
        self.preemption.check_integrity()
        self.running.check_integrity()
