"""What a step has the device compute. Nothing here waits for it, except for edits of rows with drafts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from services.worker.batch.decodes import DeviceDrafts
from services.worker.batch.device_batch import DeviceBatch
from services.worker.drafts.drafter import ComputedTokens, Observe
from services.worker.forward.forward_context import AttentionMetadata, ForwardContext, Progress, forward_context
from services.worker.forward.kv_cache import KvCache
from services.worker.forward.staging import is_on_host
from services.worker.ops import DecodeRows
from services.worker.runner.graphs.step_graphs import DecodeGraph, DraftGraph
from services.worker.runner.pooling import PromptPooler
from services.worker.runner.prompt_logprobs import PromptScorer
from services.worker.runner.rank import Rank
from services.worker.runner.steps.step_job import Draw, StepJob
from services.worker.runner.steps.step_states import StepStates
from services.worker.sampling.runs import DeviceRuns
from services.worker.sampling.sampler import Sampler
from services.worker.sampling.sampling_rows import EditedRows


class StepWork:
    """Computes the steps of one epoch, in the order of their launches.

        propose   drafts for the step, by a model, after the step before; see `propose`
        advance   the columns by slot learn what has changed, and name the inputs of a plain decode
        forward   the step's tokens: hidden states
        draw      a token at each place: a row's own, and each of its drafts
        accept    a row's tokens: the drafts that were drawn too, and one more; a plain row is a run of no drafts
        record    a row's last token and its position, where the next step finds them; states take in what counts

    Each is enqueued on the device's stream, so that the next step needs nothing of the host. Where the host edits
    logits, it draws again before drafts are accepted: in `redraw`, which is enqueued once the host knows the edits.
    """

    def __init__(
        self, rank: Rank, kv_cache: KvCache, columns: DeviceBatch, states: StepStates | None, *, has_drafts: bool
    ) -> None:
        """`has_drafts` says that tokens are drafted; models with recurrent layers have `states`."""
        self._device = rank.device
        self._ops = rank.ops
        self._model = rank.model
        # Layers that were only launched are no progress.
        self._layer_progress = Progress() if rank.stream.is_async else rank.progress
        self._kv_cache = kv_cache
        self._columns = columns
        self._states = states
        self._has_drafts = has_drafts
        self._query_starts = torch.arange(columns.num_slots + 1, dtype=torch.int32, device=rank.device)
        self._sampler = Sampler(rank.ops, rank.device)
        self._prompt_scorer = PromptScorer(rank.ops, rank.model.compute_logits)
        self._prompt_pooler = PromptPooler()

    @torch.inference_mode()
    def propose(self, drafts: DeviceDrafts) -> None:
        """Compute the drafts for the next step, once the last one was noted."""
        drafts.token_ids = drafts.compute(self._columns.columns)

    @torch.inference_mode()
    def compute(self, job: StepJob) -> None:
        """A step's work up to its results, except for the second draw of edited rows; see `Stream.enqueue`."""
        step_input, arrays = job.step_input, job.staging.upload()
        self._columns.apply(arrays, step_input.table_width)
        if self._states is not None:
            self._states.cache.begin_sequences(arrays)
        if step_input.device_drafts is not None:
            arrays = _with_drafts(arrays, step_input.device_drafts)
        if step_input.is_plain_decode:
            hidden, positions = self._forward_decode(job)
        else:
            hidden, positions = self._forward_tokens(job, arrays), arrays["row_positions"]
        if step_input.scored_chunks or step_input.pooled_chunks:
            self._read_prompts(job, hidden)
        if self._has_drafts:
            # Else it would only keep its memory.
            job.hidden = hidden
        if len(step_input.row_slots):
            draw = self._draw(job, arrays, hidden, positions)
            if len(job.options.edited) and self._has_drafts:
                draw = self._redraw_runs(job, draw)
            elif len(job.options.edited):
                job.first_draw = draw
            if job.first_draw is None:
                last, positions = self._accept(job, draw)
                self._record(job, draw, last, positions)
        if self._states is not None:
            job.results.not_finite_saves = self._states.end(step_input, arrays, job.results.counts)
        if job.first_draw is None:
            job.staging.download(job.results.tensors())

    @torch.inference_mode()
    def redraw(self, job: StepJob, edited: EditedRows) -> None:
        """Draw edited rows, which ends the step's work."""
        first, job.first_draw = job.first_draw, None
        assert first is not None, "drawn by `compute`"
        assert first.logits is not None, "kept for this"
        draw = first._replace(drawn=self._sampler.redraw(first.logits, first.drawn, job.options.rows, edited))
        last, positions = self._accept(job, draw)
        self._record(job, draw, last, positions)
        job.staging.download(job.results.tensors())

    @torch.inference_mode()
    def observe(self, job: StepJob, note: Observe) -> None:
        """Let a proposer note what the step computed."""
        hidden, results = job.hidden, job.results
        assert hidden is not None, "computed by `compute`"
        job.hidden = None
        drawn = self._query_starts[:0].long() if results.drawn is None else results.drawn.clamp(min=0)
        note(ComputedTokens(hidden, drawn, results.counts))

    def _forward_decode(self, job: StepJob) -> tuple[Tensor, Tensor]:
        """Compute a plain decode: hidden states [num_rows, hidden], and the positions of the tokens to draw."""
        num_rows, num_blocks, graph = len(job.step_input.slots), job.step_input.num_blocks, job.graph
        if isinstance(graph, DecodeGraph):
            rows = graph.graphs.rows(graph.size)
            self._columns.advance(rows, num_blocks)
            hidden = graph.graphs.replay(graph.size, self._columns.decode_slots)
            return hidden[:num_rows], rows.draw_positions[:num_rows]
        rows = DecodeRows.empty(num_rows, num_blocks, self._device)
        self._columns.advance(rows, num_blocks)
        inputs = {
            "token_ids": rows.token_ids,
            "positions": rows.positions,
            "slot_mapping": rows.slot_mapping,
            "block_tables": rows.block_tables,
            "context_lens": rows.context_lens,
            "cu_seqlens_q": self._query_starts[: num_rows + 1],
            "state_slots": self._columns.decode_slots,
        }
        return self._forward(job, inputs), rows.draw_positions

    def _forward_tokens(self, job: StepJob, arrays: dict[str, Tensor]) -> Tensor:
        """Compute tokens that the host names: hidden states [num_tokens, hidden]; empty without tokens."""
        step_input, graph = job.step_input, job.graph
        if isinstance(graph, DraftGraph):
            return graph.graphs.replay_padded(graph.size, arrays)
        if isinstance(graph, DecodeGraph):
            # A dummy, which is a row of padding.
            self._columns.pad(graph.graphs.rows(graph.size))
            return graph.graphs.replay(graph.size, self._columns.decode_slots[:0])
        if not step_input.num_tokens:
            # Every sequence to decode already has all its tokens.
            return torch.empty(0)
        if "unknown_slots" in arrays:
            last_tokens = self._columns.last_tokens(arrays["unknown_slots"])
            arrays = {**arrays, "token_ids": torch.cat((last_tokens, arrays["token_ids"][len(last_tokens) :]))}
        hidden = self._forward(job, arrays)
        if not len(step_input.slots) and not job.dp.num_tokens_across_dp:
            # A dummy that serves no other rank shows whether this one can compute, to the end.
            self._model.compute_logits(hidden[-1:])
        return hidden

    def _forward(self, job: StepJob, inputs: dict[str, Tensor]) -> Tensor:
        """Compute a step's tokens kernel by kernel; `inputs` are named as the arrays of tokens in `StepInput`."""
        step_input, states = job.step_input, self._states
        attention = AttentionMetadata(
            is_prefill=step_input.is_prefill,
            slot_mapping=inputs["slot_mapping"],
            block_tables=inputs["block_tables"],
            context_lens=inputs["context_lens"],
            cu_seqlens_q=inputs["cu_seqlens_q"],
            query_lens=tuple(step_input.query_lens.tolist()),
            context_lens_host=tuple(step_input.context_lens.tolist()),
            max_query_len=int(step_input.query_lens.max()),
            max_context_len=int(step_input.context_lens.max()),
            state_slots=None if states is None else inputs["state_slots"],
        )
        plan = self._ops.plan_attention(attention, self._kv_cache)
        context = ForwardContext(plan, self._kv_cache, job.dp, self._layer_progress)
        if states is not None:
            context = states.in_pass(context, step_input)
        with forward_context(context):
            return self._model.forward(inputs["token_ids"], inputs["positions"])

    def _read_prompts(self, job: StepJob, hidden: Tensor) -> None:
        """Score and pool the step's prompt tokens of which log-probabilities or vectors are wanted."""
        step_input, results = job.step_input, job.results
        results.prompts = self._prompt_scorer.score(step_input.scored_chunks, step_input.arrays["token_ids"], hidden)
        results.vectors = self._prompt_pooler.pool(step_input.pooled_chunks, hidden)

    def _draw(self, job: StepJob, arrays: dict[str, Tensor], hidden: Tensor, positions: Tensor) -> Draw:
        """Draw a token at each place; of rows that the host edits, too, which are drawn again before they count."""
        graph = job.graph
        if job.step_input.is_plain_decode:
            rows = self._columns.decode_draws(positions)
            if isinstance(graph, DecodeGraph) and graph.graphs.draws_tokens and not job.step_input.has_options:
                # It reads the draws of the last decode, which are those of this one now.
                return Draw(arrays, positions, None, graph.graphs.draw(graph.size)[: len(positions)])
            logits = self._model.compute_logits(hidden)
            return Draw(arrays, positions, logits, self._sampler.draw(logits, rows))
        logits = self._model.compute_logits(hidden[arrays["logit_tokens"]] if "logit_tokens" in arrays else hidden)
        if "run_firsts" in arrays:
            places = self._columns.draws(arrays["place_slots"], arrays["place_positions"])
            drawn = self._sampler.draw_runs(logits, places, DeviceRuns(arrays["run_firsts"], arrays["run_wanted"]))
        else:
            drawn = self._sampler.draw(logits, self._columns.draws(arrays["row_slots"], positions))
        return Draw(arrays, positions, logits, drawn)

    def _redraw_runs(self, job: StepJob, draw: Draw) -> Draw:
        """Draw edited rows whose step has drafts to check, or drafts that follow it. Waits."""
        assert draw.logits is not None, "kept for rows with options"
        runs, arrays = job.step_input.runs, draw.arrays
        if "run_wanted" in arrays:
            # The device may have computed them.
            runs = replace(runs, wanted=arrays["run_wanted"].cpu().numpy())
        redrawn = self._sampler.redraw_runs(draw.logits, draw.drawn, job.options.rows, runs, job.options.edited)
        job.results.failed_rows = redrawn.failed_rows
        if "run_wanted" in arrays:
            arrays = {**arrays, "run_wanted": redrawn.runs.wanted}
        return draw._replace(arrays=arrays, drawn=redrawn.drawn)

    def _accept(self, job: StepJob, draw: Draw) -> tuple[Tensor, Tensor]:
        """The last token of each row and where it was drawn, [num_rows] int64 each; drafts that it follows count."""
        if "run_firsts" not in draw.arrays:
            return draw.drawn, draw.positions
        counts, last = self._ops.accept(draw.drawn, draw.arrays["run_wanted"], draw.arrays["run_firsts"])
        job.results.counts = counts
        return last, draw.positions + (counts - 1)

    def _record(self, job: StepJob, draw: Draw, last: Tensor, positions: Tensor) -> None:
        """Leave the tokens where the next step finds them, and for the host."""
        # What is not finite is followed by token 0, which every model has.
        usable = last.clamp(min=0)
        if job.step_input.is_plain_decode:
            self._columns.record_decoded(usable)
        else:
            self._columns.record(draw.arrays["row_slots"], usable, positions)
        job.results.drawn = draw.drawn
        if len(job.options.scored):
            self._score(job, draw)

    def _score(self, job: StepJob, draw: Draw) -> None:
        """Score the tokens whose log-probabilities are wanted."""
        assert draw.logits is not None, "kept for rows with options"
        runs, results = job.step_input.runs, job.results
        lengths = runs.lengths()
        if results.counts is not None and is_on_host(results.counts):
            # Elsewhere the host would wait for them; what does not count is left out when it reads the results.
            lengths = results.counts.numpy()
        results.scored = scored = job.options.scored_places(runs, lengths)
        results.scores = self._sampler.score(draw.logits, draw.drawn, scored.places, scored.wanted)


def _with_drafts(arrays: dict[str, Tensor], drafts: DeviceDrafts) -> dict[str, Tensor]:
    """The arrays of a step with drafts that the device has computed for it."""
    token_ids, drafts.token_ids = drafts.token_ids, None
    assert token_ids is not None, "computed by `propose`"
    if "chosen_drafts" in arrays:
        token_ids = token_ids[arrays["chosen_drafts"]]
    return {
        **arrays,
        "run_wanted": arrays["run_wanted"].index_copy(0, arrays["drafted_places"], token_ids),
        "token_ids": arrays["token_ids"].index_copy(0, arrays["drafted_tokens"], token_ids),
    }
