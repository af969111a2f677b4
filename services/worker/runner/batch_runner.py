"""Launches the steps of one epoch."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from services.worker.batch.device_batch import DeviceBatch
from services.worker.batch.input_batch import InputBatch
from services.worker.batch.step_input import StepInput
from services.worker.drafts.drafted_states import ModelStates
from services.worker.drafts.drafter import DraftProposer
from services.worker.forward.kv_cache import KvCache
from services.worker.runner.graphs.step_graphs import DraftGraph, StepGraphs
from services.worker.runner.rank import Rank
from services.worker.runner.steps.coupling import Coupling
from services.worker.runner.steps.pending_step import PendingStep
from services.worker.runner.steps.step_job import JobResults, StepJob
from services.worker.runner.steps.step_states import states_in_steps
from services.worker.runner.steps.step_work import StepWork
from services.worker.runner.stream import EnqueuedWork
from services.worker.sampling.row_options import NO_OPTIONS, RowOptions
from shared.step.step import Step


class BatchRunner:
    """The sequences of one epoch, on the host and on the device, and the launches of their steps.

    A step is launched and not awaited: the next one finds its tokens on the device. For rows with a grammar or
    penalties the host needs the tokens of the step before. It waits for these while the device computes the forward
    pass, so that the device does not wait:

        host      launch N   wait for the tokens of N - 1   edit the logits of N, launch their draw   launch N + 1
        device    ──────────── N - 1 ──────────────┤── forward pass of N ──────────────────────┤─ draw ─┤── N + 1 ──

    With a draft proposer a launch waits for the tokens of the step before: the device accepts drafts and records the
    last tokens, but the host plans the next step, and what that computes depends on how many were accepted. Meanwhile
    the device notes that step for the proposer, and drafts for the next one. It needs no tokens of the host for that,
    unless drafts are looked up in them:

        host      begin N, enqueue its drafts   wait for the tokens of N - 1   plan N and launch it
        device    ──── N - 1 ───────┤── N - 1 is noted ──┤── drafts for N ──────────┤── N ──
    """

    def __init__(
        self,
        rank: Rank,
        batch: InputBatch,
        kv_cache: KvCache,
        *,
        graphs: StepGraphs | None,
        proposer: DraftProposer | None,
        states: ModelStates | None = None,
    ) -> None:
        """Begin with an empty `batch`, which has a drafter exactly if there is a `proposer`.

        `states` are those of a model with recurrent layers.
        """
        self._rank = rank
        self._stream = rank.stream
        self._coupling = Coupling(rank.layout, graphs)
        self._batch = batch
        draws = None if graphs is None else graphs.decodes.draw_rows
        columns = DeviceBatch(rank.ops, batch.limits, rank.device, decode_draws=draws)
        self._proposer = proposer
        self._states = None if states is None else states_in_steps(states, kv_cache.block_size)
        self._work = StepWork(rank, kv_cache, columns, self._states, has_drafts=proposer is not None)
        # Whether what is proposed depends on the tokens of the step before, or the host has them anyway.
        self._is_asked_first = not rank.stream.is_async or proposer is None or proposer.needs_tokens
        # The last step with a proposer, until the batch was told its tokens.
        self._unrecorded: PendingStep | None = None
        # What the proposer notes of that step.
        self._noting: list[EnqueuedWork] = []
        # The last step with edited rows, until their states have learned its tokens.
        self._unlearned: PendingStep | None = None

    @torch.inference_mode()
    def launch(self, step: Step) -> PendingStep:
        """Update the batch, and have the device compute the step.

        Raises:
            StepMismatchError: the step does not fit the batch; nothing was computed but drafts for it.
        """
        if self._unrecorded is not None and self._is_asked_first:
            self._record_sampled(self._unrecorded, step)
        planned = self._batch.begin(step)
        # The time that the proposer took counts as that of the step.
        enqueued, self._noting = self._noting, []
        if planned.drafts is not None and planned.drafts.device is not None:
            enqueued.append(self._stream.enqueue(partial(self._work.propose, planned.drafts.device)))
        if self._unrecorded is not None:
            self._record_sampled(self._unrecorded, step)
        step_input = self._batch.finish(planned)
        job = self._make_job(step, step_input)
        enqueued.append(self._stream.enqueue(partial(self._work.compute, job)))
        pending = PendingStep(step, job, enqueued, self._rank, is_computed=not self._stream.is_async)
        if self._proposer is not None:
            self._unrecorded = pending
            if self._proposer.follows_steps and len(step_input.slots):
                self._note(self._proposer, job)
            return pending
        if len(job.options.edited):
            self._learn_tokens()
            pending.edited = edited = job.options.edit()
            job.results.failed_rows = edited.numbers[edited.has_failed]
            enqueued.append(self._stream.enqueue(partial(self._work.redraw, job, edited)))
            self._unlearned = pending
        if self._unlearned is not None and not self._stream.is_async:
            # The next edits are prepared until the next step comes.
            self._learn_tokens()
        return pending

    def _make_job(self, step: Step, step_input: StepInput) -> StepJob:
        dp, graph = self._coupling.plan(step, step_input)
        arrays, row_width = step_input.arrays, 0
        if isinstance(graph, DraftGraph):
            arrays, row_width = graph.graphs.pad(step_input, graph.size), graph.graphs.row_width
        if self._states is not None:
            arrays |= self._states.arrays(step_input, row_width)
        return StepJob(
            step_input=step_input,
            staging=self._stream.stage(arrays),
            dp=dp,
            graph=graph,
            options=RowOptions.of(self._batch.sampling(step_input)) if step_input.has_options else NO_OPTIONS,
            results=JobResults(),
        )

    def _record_sampled(self, pending: PendingStep, step: Step) -> None:
        """Tell the batch the tokens of the step before `step`. Waits for these.

        A slot that leaves in `step` may have another sequence by now.
        """
        self._unrecorded = None
        sampled, step_input = pending.read().sampled, pending.job.step_input
        slots, draft_counts = step_input.row_slots, step_input.draft_counts
        if len(step.leave_slots):
            stays = np.isin(slots, step.leave_slots, invert=True)
            sampled, slots = sampled.of_rows(stays), slots[stays]
            draft_counts = None if draft_counts is None else draft_counts[stays]
        self._batch.record_sampled(slots, sampled.token_ids, sampled.counts, draft_counts)

    def _note(self, proposer: DraftProposer, job: StepJob) -> None:
        """Let the proposer note a step that was enqueued, if it has anything to note."""
        note = proposer.observe(job.step_input)
        if note is not None:
            self._noting.append(self._stream.enqueue(partial(self._work.observe, job, note)))

    def _learn_tokens(self) -> None:
        """Tell the sequences with edited logits the tokens that they drew last. Waits for these."""
        pending, self._unlearned = self._unlearned, None
        if pending is not None and pending.edited is not None:
            pending.edited.append(pending.read().drawn[pending.edited.numbers])
