"""Computes the steps of one epoch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.worker.batch.enter_checks import require
from services.worker.batch.step_input import StepInput, StepTokens
from services.worker.forward.forward_context import (
    AttentionMetadata,
    DpMetadata,
    ForwardContext,
    Progress,
    forward_context,
)
from services.worker.forward.kv_cache import KvCache
from services.worker.forward.staging import HostArrays, Staging
from services.worker.layout import RankLayout
from services.worker.ops import DecodeRows
from services.worker.runner.device_batch import DeviceBatch
from services.worker.runner.graph_runner import DecodeGraphs
from services.worker.runner.host_end import HostEnd
from services.worker.runner.input_batch import InputBatch
from services.worker.runner.pending_step import HostResult, PendingStep
from services.worker.runner.rank import Rank
from services.worker.sampling.sampler import SamplingRows
from services.worker.spec_decode.drafts import DraftProposer
from services.worker.step import Int32Column, Step


@dataclass(slots=True)
class _Job:
    """A step's work on the device, with all that it reads on the host."""

    step_input: StepInput
    staging: Staging
    dp: DpMetadata
    graph_size: int | None
    """The batch size of the graph that computes it; None if it runs eagerly."""
    tokens: StepTokens | None
    """None if the device makes them."""
    sampling: SamplingRows | None
    """None if the device draws."""
    result: HostResult | None = None


class BatchRunner:
    """The sequences of one epoch, on the host and on the device, and the computation of their steps.

    A step that only draws tokens is launched and not awaited: the next one finds the tokens on the device. A step with
    drafts, grammars, penalties, log-probabilities or compared replays ends on the host, so its launch waits for it: the
    device then idles from the end of the step until the next one is launched.
    """

    def __init__(
        self,
        rank: Rank,
        batch: InputBatch,
        kv_cache: KvCache,
        *,
        graphs: DecodeGraphs | None,
        proposer: DraftProposer | None,
    ) -> None:
        """Begin with an empty `batch`, which has a drafter exactly if there is a `proposer`."""
        self._device = rank.device
        self._stream = rank.stream
        self._ops = rank.ops
        self._model = rank.model
        self._progress = rank.progress
        # Layers that were only launched are no progress.
        self._layer_progress = Progress() if rank.stream.is_async else rank.progress
        self._kv_cache = kv_cache
        self._layout = rank.layout
        self._graphs = graphs
        self._proposer = proposer
        self._batch = batch
        self._columns = DeviceBatch(rank.ops, batch.limits, rank.device)
        # As the device has them.
        self._decode_slots: Int32Column = np.empty(0, np.int32)
        self._not_finite = torch.tensor(-1, device=rank.device)
        self._query_starts = torch.arange(batch.limits.max_num_seqs + 1, dtype=torch.int32, device=rank.device)
        self._host_end = HostEnd(rank, batch, self._columns, proposer)

    @torch.inference_mode()
    def launch(self, step: Step) -> PendingStep:
        """Update the batch, and have the device compute the step.

        Raises:
            StepMismatchError: the step does not fit the batch; nothing was computed.
        """
        step_input = self._batch.apply(step)
        dp = _dp_metadata(step, self._layout, step_input.num_tokens)
        graph_size = self._graph_size(step_input, dp)
        are_made_there = step_input.is_plain_decode and self._proposer is None
        job = _Job(
            step_input=step_input,
            staging=self._stream.claim_staging(),
            dp=dp,
            graph_size=graph_size,
            tokens=None if are_made_there else self._batch.tokens(step_input),
            sampling=self._batch.sampling(step_input) if step_input.needs_host else None,
        )
        num_values = 0 if step_input.needs_host else len(step_input.row_slots)
        job.staging.pack(self._arrays(job), num_values=num_values)
        launch = self._stream.launch(partial(self._compute, job))
        if step_input.needs_host:
            launch.wait()
        else:
            self._batch.record_drawn(step_input.row_slots)
        return PendingStep(step, step_input, launch, self._stream, job.staging, self._progress, job.result)

    def _graph_size(self, step_input: StepInput, dp: DpMetadata) -> int | None:
        """The batch size of the graph that computes the step; coupled ranks are told.

        Raises:
            StepMismatchError: there is no such graph, or it does not hold the step.
        """
        if not dp.num_tokens_across_dp:
            if self._graphs is None or not step_input.is_plain_decode:
                return None
            return self._graphs.size_for(len(step_input.slots))
        if not dp.graph_batch_size:
            return None
        sizes = () if self._graphs is None else self._graphs.sizes
        require(dp.graph_batch_size in sizes, "graph_batch_size is not one of the captured sizes")
        is_decode = not step_input.is_prefill and step_input.draft_counts is None
        require(is_decode and step_input.num_tokens <= dp.graph_batch_size, "the step does not fit its graph")
        return dp.graph_batch_size

    def _arrays(self, job: _Job) -> HostArrays:
        """What the device needs and does not have."""
        step_input, tokens = job.step_input, job.tokens
        arrays = dict(step_input.changes)
        if step_input.is_plain_decode:
            if not np.array_equal(step_input.slots, self._decode_slots):
                self._decode_slots = step_input.slots
                arrays["decode_slots"] = step_input.slots.astype(np.int64)
            return arrays
        assert tokens is not None, "only a plain decode's tokens are made on the device"
        arrays |= {
            "token_ids": tokens.token_ids,
            "positions": tokens.positions,
            "slot_mapping": tokens.slot_mapping,
            "block_tables": tokens.block_tables,
            "context_lens": step_input.context_lens,
            "cu_seqlens_q": step_input.cu_seqlens_q,
            "row_slots": step_input.row_slots.astype(np.int64),
            "row_positions": step_input.row_positions,
        }
        if step_input.num_decodes and self._proposer is None:
            # Without drafts these are the first tokens.
            arrays["unknown_slots"] = step_input.slots[: step_input.num_decodes].astype(np.int64)
        logit_tokens = step_input.logit_tokens()
        if logit_tokens is not None:
            arrays["logit_tokens"] = logit_tokens
        return arrays

    @torch.inference_mode()
    def _compute(self, job: _Job) -> None:
        """The step's work on the device; see `Stream.launch`."""
        arrays = job.staging.upload()
        self._columns.apply(arrays, job.step_input.table_width)
        if job.step_input.is_plain_decode:
            hidden, positions = self._decode(job)
            slots = None
        else:
            hidden, positions = self._run_eagerly(job, arrays), arrays["row_positions"]
            slots = arrays["row_slots"]
        if job.sampling is not None:
            compute_logits = partial(self._logits, hidden, arrays)
            job.result = self._host_end.finish(
                job.step_input, job.tokens, rows=job.sampling, hidden=hidden, compute_logits=compute_logits
            )
        elif len(job.step_input.row_slots):
            logits = self._logits(hidden, arrays)
            draws = self._columns.decode_draws(positions) if slots is None else self._columns.draws(slots, positions)
            token_ids, is_finite = self._ops.sample(logits, draws)
            drawn = torch.where(is_finite, token_ids, self._not_finite)
            job.staging.download(drawn)
            # What is not finite is followed by token 0, which every model has.
            usable = drawn.clamp(min=0)
            if slots is None:
                self._columns.record_decoded(usable)
            else:
                self._columns.record(slots, usable, positions)

    def _decode(self, job: _Job) -> tuple[Tensor, Tensor]:
        """Compute a plain decode: hidden states [num_rows, hidden], and the positions of the tokens to draw."""
        step_input = job.step_input
        num_rows = len(step_input.slots)
        if self._graphs is not None and job.graph_size is not None:
            rows = self._graphs.rows(job.graph_size)
            self._columns.advance(rows, step_input.num_blocks)
            return self._graphs.replay(job.graph_size)[:num_rows], rows.draw_positions[:num_rows]
        rows = DecodeRows.empty(num_rows, step_input.num_blocks, self._device)
        self._columns.advance(rows, step_input.num_blocks)
        attention = AttentionMetadata(
            is_prefill=False,
            slot_mapping=rows.slot_mapping,
            block_tables=rows.block_tables,
            context_lens=rows.context_lens,
            cu_seqlens_q=self._query_starts[: num_rows + 1],
            **_host_lengths(step_input),
        )
        return self._forward(rows.token_ids, rows.positions, attention, job.dp), rows.draw_positions

    def _run_eagerly(self, job: _Job, arrays: dict[str, Tensor]) -> Tensor:
        """Hidden states [num_tokens, hidden]; empty without tokens."""
        if self._graphs is not None and job.graph_size is not None:
            # A dummy, which is a row of padding.
            self._columns.pad(self._graphs.rows(job.graph_size))
            return self._graphs.replay(job.graph_size)
        if not job.step_input.num_tokens:
            # Every sequence to decode already has all its tokens.
            return torch.empty(0)
        token_ids = arrays["token_ids"]
        if "unknown_slots" in arrays:
            last_tokens = self._columns.last_tokens(arrays["unknown_slots"])
            token_ids = torch.cat((last_tokens, token_ids[len(last_tokens) :]))
        attention = AttentionMetadata(
            is_prefill=job.step_input.is_prefill,
            slot_mapping=arrays["slot_mapping"],
            block_tables=arrays["block_tables"],
            context_lens=arrays["context_lens"],
            cu_seqlens_q=arrays["cu_seqlens_q"],
            **_host_lengths(job.step_input),
        )
        return self._forward(token_ids, arrays["positions"], attention, job.dp)

    def _forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionMetadata, dp: DpMetadata) -> Tensor:
        context = ForwardContext.for_step(self._ops, attention, self._kv_cache, dp=dp, progress=self._layer_progress)
        with forward_context(context):
            return self._model.forward(token_ids, positions)

    def _logits(self, hidden: Tensor, arrays: dict[str, Tensor]) -> Tensor:
        logit_tokens = arrays.get("logit_tokens")
        return self._model.compute_logits(hidden if logit_tokens is None else hidden[logit_tokens])


def _dp_metadata(step: Step, layout: RankLayout, num_tokens: int) -> DpMetadata:
    """What coupled ranks compute in this step, checked against this rank's `num_tokens`.

    If it differed, partners would be left waiting in a collective.

    Raises:
        StepMismatchError: the numbers do not fit.
    """
    counts = step.num_tokens_across_dp
    require(
        len(counts) == (layout.dp_size if layout.is_coupled else 0),
        "num_tokens_across_dp must have one entry per coupled DP rank",
        num_ranks=len(counts),
    )
    require(bool(counts) or not step.is_dummy, "a dummy step needs coupled ranks")
    require(bool(counts) or not step.graph_batch_size, "graph_batch_size needs coupled ranks")
    if counts:
        require(min(counts) > 0, "num_tokens_across_dp has a rank that computes nothing")
        require(
            counts[layout.dp_rank] == num_tokens,
            "num_tokens_across_dp differs from the number of tokens that the step computes",
            num_tokens=num_tokens,
        )
    return DpMetadata(counts, step.graph_batch_size)


def _host_lengths(step_input: StepInput) -> dict[str, Any]:
    """The fields of `AttentionMetadata` that are on the host."""
    return {
        "query_lens": tuple(step_input.query_lens.tolist()),
        "context_lens_host": tuple(step_input.context_lens.tolist()),
        "max_query_len": int(step_input.query_lens.max()),
        "max_context_len": int(step_input.context_lens.max()),
    }
