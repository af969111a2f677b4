"""What a step has the device compute. Nothing here waits for it, except for edits of rows with drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.worker.batch.decodes import DeviceDrafts
from services.worker.batch.device_batch import DeviceBatch
from services.worker.batch.step_input import StepInput
from services.worker.drafts.drafted_states import DraftedRows, ModelStates
from services.worker.drafts.drafter import ComputedTokens, Observe
from services.worker.drafts.state_end import StateEnd
from services.worker.forward.forward_context import (
    AttentionMetadata,
    DpMetadata,
    ForwardContext,
    Progress,
    forward_context,
)
from services.worker.forward.kv_cache import KvCache
from services.worker.forward.staging import HostArrays, is_on_host
from services.worker.forward.state_cache import spare_slots
from services.worker.ops import DecodeRows
from services.worker.runner.graphs.draft_graphs import DraftGraphs
from services.worker.runner.graphs.step_graphs import StepGraphs
from services.worker.runner.pooling import PromptPooler
from services.worker.runner.prompt_logprobs import PromptScorer
from services.worker.runner.rank import Rank
from services.worker.runner.steps.step_job import Draw, DrawnRows, StepJob
from services.worker.sampling.sampler import Sampler
from services.worker.sampling.sampling_rows import EditedRows
from shared.step.columns import Int32Column


class StepWork:
    """Computes the steps of one epoch, in the order of their launches."""

    def __init__(
        self,
        rank: Rank,
        kv_cache: KvCache,
        columns: DeviceBatch,
        graphs: StepGraphs | None,
        *,
        has_drafts: bool,
        states: ModelStates | None = None,
    ) -> None:
        """`has_drafts` says that tokens are drafted; models with recurrent layers have `states`."""
        self._device = rank.device
        self._ops = rank.ops
        self._model = rank.model
        # Layers that were only launched are no progress.
        self._layer_progress = Progress() if rank.stream.is_async else rank.progress
        self._kv_cache = kv_cache
        self._states = states
        self._columns = columns
        self._graphs = graphs
        self._has_drafts = has_drafts
        self._state_end: StateEnd | None = None
        if states is not None and states.drafted is not None:
            self._state_end = StateEnd(states.cache, states.drafted, kv_cache.block_size)
        # As the device has them.
        self._decode_slots: Int32Column = np.empty(0, np.int32)
        self._query_starts = torch.arange(columns.num_slots + 1, dtype=torch.int32, device=rank.device)
        self._sampler = Sampler(rank.ops, rank.device)
        self._prompt_scorer = PromptScorer(rank.ops, rank.model.compute_logits)
        self._prompt_pooler = PromptPooler()

    def arrays(self, job: StepJob) -> HostArrays:
        """What the device needs for a step and does not have. Called once per step, in order."""
        step_input = job.step_input
        arrays = dict(step_input.changes)
        if self._state_end is not None:
            padded = None if step_input.draft_counts is None else self._draft_graph(job)
            arrays |= self._state_end.arrays(step_input, 0 if padded is None else padded.graphs.row_width)
        if step_input.is_plain_decode:
            if not np.array_equal(step_input.slots, self._decode_slots):
                self._decode_slots = step_input.slots
                arrays["decode_slots"] = step_input.slots.astype(np.int64)
            return arrays
        arrays |= {"row_slots": step_input.row_slots.astype(np.int64), "row_positions": step_input.row_positions}
        logit_tokens = step_input.logit_tokens()
        if logit_tokens is not None:
            arrays["logit_tokens"] = logit_tokens
        if step_input.draft_counts is not None:
            row = job.runs.rows()
            arrays["place_slots"] = arrays["row_slots"][row]
            arrays["place_positions"] = step_input.row_positions[row] + job.runs.offsets()
            arrays |= job.runs.arrays()
            if step_input.chosen_drafts is not None:
                arrays["chosen_drafts"] = step_input.chosen_drafts
            if step_input.device_drafts is not None:
                # Decodes are a step's first sequences, so their tokens are its first ones too.
                arrays["drafted_places"] = job.runs.drafted()
            if (padded := self._draft_graph(job)) is not None:
                return arrays | padded.graphs.pad(step_input, padded.size)
        arrays |= {
            "token_ids": step_input.token_ids,
            "positions": step_input.positions,
            "slot_mapping": step_input.slot_mapping,
            "block_tables": step_input.block_tables,
            "context_lens": step_input.context_lens,
            "cu_seqlens_q": step_input.cu_seqlens_q,
        }
        if self._states is not None and len(step_input.slots):
            arrays["state_slots"] = step_input.slots.astype(np.int64)
        if step_input.num_decodes and not self._has_drafts:
            # Without drafts these are the first tokens.
            arrays["unknown_slots"] = step_input.slots[: step_input.num_decodes].astype(np.int64)
        return arrays

    @torch.inference_mode()
    def draft(self, drafts: DeviceDrafts) -> None:
        """Compute the drafts for the next step, once the last one was noted."""
        drafts.token_ids = drafts.compute(self._columns.columns)

    @torch.inference_mode()
    def compute(self, job: StepJob) -> None:
        """A step's work up to its results, except for the second draw of edited rows; see `Stream.enqueue`."""
        arrays = job.staging.upload()
        self._columns.apply(arrays, job.step_input.table_width)
        if self._states is not None:
            self._states.cache.begin_sequences(arrays)
        if job.step_input.device_drafts is not None:
            arrays = _with_drafts(arrays, job.step_input.device_drafts)
        if job.step_input.is_plain_decode:
            hidden, positions = self._decode(job)
        else:
            hidden, positions = self._compute_tokens(job, arrays), arrays["row_positions"]
            if job.step_input.scored_chunks:
                self._score(job, hidden)
            if job.step_input.pooled_chunks:
                job.results.vectors = self._prompt_pooler.pool(job.step_input.pooled_chunks, hidden)
            if len(hidden) and not len(job.step_input.slots) and not job.dp.num_tokens_across_dp:
                # A dummy that serves no other rank shows whether this one can compute, to the end.
                self._logits(hidden[-1:], None)
        if len(job.step_input.row_slots):
            self._draw(job, hidden, DrawnRows.of(arrays, positions))
        if self._has_drafts:
            # Else it would only keep its memory.
            job.hidden = hidden
        if self._state_end is not None:
            results = job.results
            results.not_finite_saves = self._state_end.finish(job.step_input, arrays, results.counts)
        elif self._states is not None and "saved_from" in arrays:
            job.results.not_finite_saves = self._states.cache.save(arrays["saved_from"], arrays["saved_to"])
        if job.first_draw is None:
            job.staging.download(job.results.tensors())

    @torch.inference_mode()
    def redraw(self, job: StepJob, edited: EditedRows) -> None:
        """Draw edited rows, which ends the step's work."""
        first, options = job.first_draw, job.options
        assert first is not None, "drawn by `compute`"
        assert first.logits is not None, "kept for this"
        assert options is not None, "what edits them"
        job.first_draw = None
        self._end_draw(job, first._replace(drawn=self._sampler.redraw(first.logits, first.drawn, options.rows, edited)))
        job.staging.download(job.results.tensors())

    @torch.inference_mode()
    def observe(self, job: StepJob, note: Observe) -> None:
        """Let a proposer note what the step computed."""
        hidden, results = job.hidden, job.results
        assert hidden is not None, "computed by `compute`"
        job.hidden = None
        drawn = self._query_starts[:0].long() if results.drawn is None else results.drawn.clamp(min=0)
        note(ComputedTokens(hidden, drawn, results.counts))

    def _decode(self, job: StepJob) -> tuple[Tensor, Tensor]:
        """Compute a plain decode: hidden states [num_rows, hidden], and the positions of the tokens to draw."""
        step_input = job.step_input
        num_rows = len(step_input.slots)
        if self._graphs is not None and job.graph is not None:
            rows = self._graphs.decodes.rows(job.graph)
            self._columns.advance(rows, step_input.num_blocks)
            hidden = self._graphs.decodes.replay(job.graph, self._columns.decode_slots)
            return hidden[:num_rows], rows.draw_positions[:num_rows]
        rows = DecodeRows.empty(num_rows, step_input.num_blocks, self._device)
        self._columns.advance(rows, step_input.num_blocks)
        attention = AttentionMetadata(
            is_prefill=False,
            slot_mapping=rows.slot_mapping,
            block_tables=rows.block_tables,
            context_lens=rows.context_lens,
            cu_seqlens_q=self._query_starts[: num_rows + 1],
            state_slots=None if self._states is None else self._columns.decode_slots,
            **_host_lengths(step_input),
        )
        return self._forward(rows.token_ids, rows.positions, attention, job.dp), rows.draw_positions

    def _compute_tokens(self, job: StepJob, arrays: dict[str, Tensor]) -> Tensor:
        """Compute tokens that the host names: hidden states [num_tokens, hidden]; empty without tokens."""
        step_input, num_drafted = job.step_input, 0
        if step_input.draft_counts is not None:
            if (padded := self._draft_graph(job)) is not None:
                return padded.graphs.replay_padded(padded.size, arrays)
            num_drafted = step_input.num_decodes
        elif self._graphs is not None and job.graph is not None:
            # A dummy, which is a row of padding.
            self._columns.pad(self._graphs.decodes.rows(job.graph))
            return self._graphs.decodes.replay(job.graph, self._columns.decode_slots[:0])
        if not step_input.num_tokens:
            # Every sequence to decode already has all its tokens.
            return torch.empty(0)
        token_ids = arrays["token_ids"]
        if "unknown_slots" in arrays:
            last_tokens = self._columns.last_tokens(arrays["unknown_slots"])
            token_ids = torch.cat((last_tokens, token_ids[len(last_tokens) :]))
        attention = AttentionMetadata(
            is_prefill=step_input.is_prefill,
            slot_mapping=arrays["slot_mapping"],
            block_tables=arrays["block_tables"],
            context_lens=arrays["context_lens"],
            cu_seqlens_q=arrays["cu_seqlens_q"],
            state_slots=None if self._states is None else _state_slots(self._states, arrays),
            **_host_lengths(step_input),
        )
        return self._forward(token_ids, arrays["positions"], attention, job.dp, num_drafted=num_drafted)

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionMetadata,
        dp: DpMetadata,
        *,
        num_drafted: int = 0,
    ) -> Tensor:
        """Compute a pass whose first `num_drafted` sequences are decodes, some of them with drafts."""
        states = self._states
        context = ForwardContext.for_step(
            self._ops,
            attention,
            self._kv_cache,
            dp=dp,
            progress=self._layer_progress,
            states=None if states is None else states.cache,
        )
        if states is not None and states.drafted is not None and num_drafted:
            context = replace(context, drafted=states.drafted.of_pass(DraftedRows.split(attention, num_drafted)))
        with forward_context(context):
            return self._model.forward(token_ids, positions)

    def _logits(self, hidden: Tensor, logit_tokens: Tensor | None) -> Tensor:
        return self._model.compute_logits(hidden if logit_tokens is None else hidden[logit_tokens])

    def _score(self, job: StepJob, hidden: Tensor) -> None:
        """Score the step's prompt tokens whose log-probabilities are wanted."""
        step_input = job.step_input
        job.results.prompts = self._prompt_scorer.score(step_input.scored_chunks, step_input.token_ids, hidden)

    def _draw(self, job: StepJob, hidden: Tensor, rows: DrawnRows) -> None:
        """Draw the rows' tokens; those that the host edits are drawn again, without drafts in `redraw`."""
        graph = None if rows.slots is not None or job.options is not None else job.graph
        if self._graphs is not None and self._graphs.decodes.draws_tokens and graph is not None:
            # It reads the draws of the last decode, which this makes those of this one.
            self._columns.decode_draws(rows.positions)
            drawn = self._graphs.decodes.draw(graph)[: len(rows.positions)]
            self._end_draw(job, Draw(rows, None, drawn))
            return
        logits = self._logits(hidden, rows.logit_tokens)
        if rows.places is not None:
            places = self._columns.draws(rows.places.slots, rows.places.positions)
            drawn = self._sampler.draw_runs(logits, places, rows.places.runs)
        elif rows.slots is not None:
            drawn = self._sampler.draw(logits, self._columns.draws(rows.slots, rows.positions))
        else:
            drawn = self._sampler.draw(logits, self._columns.decode_draws(rows.positions))
        draw = Draw(rows, logits, drawn)
        if not job.is_edited:
            self._end_draw(job, draw)
        elif not self._has_drafts:
            job.first_draw = draw
        else:
            self._end_draw(job, self._redraw_runs(job, draw, logits))

    def _redraw_runs(self, job: StepJob, draw: Draw, logits: Tensor) -> Draw:
        """Draw edited rows whose step has drafts to check, or drafts that follow it. Waits."""
        assert job.options is not None, "what edits them"
        rows, runs = draw.rows, job.runs
        if rows.places is not None:
            # The device may have computed them.
            runs = replace(runs, wanted=rows.places.runs.wanted.cpu().numpy())
        redrawn = self._sampler.redraw_runs(logits, draw.drawn, job.options.rows, runs, job.options.edited)
        job.results.failed_rows = redrawn.failed_rows
        if rows.places is not None:
            rows = rows._replace(places=rows.places._replace(runs=redrawn.runs))
        return Draw(rows, logits, redrawn.drawn)

    def _end_draw(self, job: StepJob, draw: Draw) -> None:
        """Accept drafts, and leave the tokens where the next step finds them, and for the host."""
        rows, results, last, positions = draw.rows, job.results, draw.drawn, draw.rows.positions
        results.drawn = draw.drawn
        if rows.places is not None:
            results.counts, last = self._ops.accept(draw.drawn, rows.places.runs.wanted, rows.places.runs.firsts)
            positions = positions + (results.counts - 1)
        # What is not finite is followed by token 0, which every model has.
        usable = last.clamp(min=0)
        if rows.slots is None:
            self._columns.record_decoded(usable)
        else:
            self._columns.record(rows.slots, usable, positions)
        if job.options is not None and len(job.options.scored):
            assert draw.logits is not None, "kept for rows with options"
            lengths = job.runs.lengths()
            if results.counts is not None and is_on_host(results.counts):
                # Elsewhere the host would wait for them; what does not count is left out when it reads the results.
                lengths = results.counts.numpy()
            results.scored = scored = job.options.scored_places(job.runs, lengths)
            results.scores = self._sampler.score(draw.logits, draw.drawn, scored.places, scored.wanted)

    def _draft_graph(self, job: StepJob) -> _DraftGraph | None:
        """The graph that computes a step with drafts; None if none does."""
        drafts = None if self._graphs is None else self._graphs.drafts
        return None if drafts is None or job.graph is None else _DraftGraph(drafts, job.graph)


class _DraftGraph(NamedTuple):
    graphs: DraftGraphs
    size: int


def _with_drafts(arrays: dict[str, Tensor], drafts: DeviceDrafts) -> dict[str, Tensor]:
    """The arrays of a step with drafts that the device has computed for it."""
    token_ids, drafts.token_ids = drafts.token_ids, None
    assert token_ids is not None, "computed by `draft`"
    if "chosen_drafts" in arrays:
        token_ids = token_ids[arrays["chosen_drafts"]]
    places = arrays["drafted_places"]
    name, tokens = "token_ids", places + 1
    if "padded_token_ids" in arrays:
        name, tokens = "padded_token_ids", arrays["padded_places"][tokens]
    return {
        **arrays,
        "run_wanted": arrays["run_wanted"].index_copy(0, places, token_ids),
        name: arrays[name].index_copy(0, tokens, token_ids),
    }


def _state_slots(states: ModelStates, arrays: dict[str, Tensor]) -> Tensor:
    """The slots of the step's sequences, or of a dummy."""
    return arrays["state_slots"] if "state_slots" in arrays else spare_slots(states.cache, 1)


def _host_lengths(step_input: StepInput) -> dict[str, Any]:
    """The fields of `AttentionMetadata` that are on the host."""
    return {
        "query_lens": tuple(step_input.query_lens.tolist()),
        "context_lens_host": tuple(step_input.context_lens.tolist()),
        "max_query_len": int(step_input.query_lens.max()),
        "max_context_len": int(step_input.context_lens.max()),
    }
