"""Captured decode steps, one graph per batch size: a replay costs the host one call instead of one per kernel."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from services.worker.batch.enter_checks import BatchLimits
from services.worker.forward.capture import Capture, NotRepeatableError
from services.worker.forward.forward_context import AttentionMetadata, DpMetadata, ForwardContext, forward_context
from services.worker.layout import RankLayout
from services.worker.ops import DecodeRows


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """How graphs are captured."""

    capture: Capture
    batch_sizes: tuple[int, ...]


class DecodeGraphs:
    """Replays decode steps of one token per sequence, padded to a captured batch size, from static inputs.

        `DecodeRows`        rows 0 … n - 1 of the step     rows n … size - 1: padding
        token_ids           last tokens                    0
        slot_mapping        slots                          -1: nothing is stored
        context_lens        lengths                        1
        block_tables        blocks                         0: reads whatever block 0 holds

    A padded row's results are garbage, and reach no other row.

    A capture computes, so all ranks of its collectives must capture at the same point. A TP group's ranks do when an
    epoch begins; of coupled groups an epoch may reach only some, so they capture in their first step that runs from a
    graph, anew in each epoch.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor], Tensor],
        make_context: Callable[[AttentionMetadata, DpMetadata], ForwardContext],
        limits: BatchLimits,
        settings: GraphSettings,
        device: torch.device,
        *,
        layout: RankLayout,
    ) -> None:
        """Capture a graph for each batch size that a batch within `limits` can need, or for the smallest of them.

        Args:
            forward: `CausalLM.forward`.
            make_context: Makes the context of a forward pass with this metadata.

        Raises:
            NotRepeatableError: the model's decode steps cannot be captured.
        """
        if not (layout.is_alone or settings.capture.holds_collectives):
            raise NotRepeatableError("ranks exchange tensors")
        self._forward = forward
        self._make_context = make_context
        self._capture = settings.capture
        self._limits = limits
        self._layout = layout
        self.sizes = tuple(needed_sizes(settings.batch_sizes, limits.max_num_seqs))
        size = self.sizes[-1]
        self._rows = DecodeRows.padding(size, -(-limits.context_length // limits.block_size), device)
        self._cu_seqlens_q = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._replays: dict[int, Callable[[], Tensor]] = {}
        if not layout.is_coupled:
            self._capture_for(self.sizes[0])

    def fits(self, limits: BatchLimits) -> bool:
        """Whether the graphs also serve another epoch, with the same KV cache."""
        if self._layout.is_coupled:
            return False
        mine = self._limits
        return (limits.max_num_seqs, limits.block_size) == (mine.max_num_seqs, mine.block_size)

    def size_for(self, num_rows: int) -> int | None:
        """The smallest captured batch size that holds a decode of `num_rows`; None if it is too large for all."""
        place = bisect_left(self.sizes, num_rows)
        return self.sizes[place] if place < len(self.sizes) else None

    def rows(self, size: int) -> DecodeRows:
        """The inputs of the graph of this size, padding included, to be written before `replay`."""
        return self._rows.first(size)

    def replay(self, size: int) -> Tensor:
        """Compute a decode from `rows`: hidden states [size, hidden], which the next call may overwrite."""
        if size not in self._replays:
            self._capture_for(size)
        return self._replays[size]()

    def _capture_for(self, size: int) -> None:
        """Capture this size, or all of them if that is to be ahead of their first steps.

        In the latter case no step has run from a graph before, so the rows that this size has not are still padding.
        """
        sizes = reversed(self.sizes) if self._capture.is_ahead else (size,)
        self._replays |= {each: self._make_replay(each) for each in sizes}

    def _make_replay(self, size: int) -> Callable[[], Tensor]:
        # A collection during a capture may free device memory, which ends the capture.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.inference_mode():
                return self._capture(partial(self._compute, size))
        finally:
            if was_enabled:
                gc.enable()

    def _compute(self, size: int) -> Tensor:
        dp = DpMetadata((size,) * self._layout.dp_size if self._layout.is_coupled else (), size)
        with forward_context(self._make_context(self._metadata(size), dp)):
            return self._forward(self._rows.token_ids[:size], self._rows.positions[:size])

    def _metadata(self, size: int) -> AttentionMetadata:
        """The metadata of a step of `size` rows; lengths on the host are upper bounds if they are recorded."""
        rows = self._rows.first(size)
        longest = (self._limits.context_length,) * size
        host_lengths = longest if self._capture.is_recorded else tuple(rows.context_lens.tolist())
        return AttentionMetadata(
            is_prefill=False,
            slot_mapping=rows.slot_mapping,
            block_tables=rows.block_tables,
            context_lens=rows.context_lens,
            cu_seqlens_q=self._cu_seqlens_q[: size + 1],
            query_lens=(1,) * size,
            context_lens_host=host_lengths,
            max_query_len=1,
            max_context_len=max(host_lengths),
        )


def needed_sizes(batch_sizes: Sequence[int], max_num_seqs: int) -> list[int]:
    """The sizes, ascending, that batches of up to `max_num_seqs` rows need."""
    ascending = sorted(set(batch_sizes))
    return ascending[: bisect_left(ascending, max_num_seqs) + 1]
