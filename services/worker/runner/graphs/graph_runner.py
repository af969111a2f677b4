"""Captured decode steps, one graph per batch size: a replay costs the host one call instead of one per kernel."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from services.worker.batch.enter_checks import BatchLimits
from services.worker.drafts.drafted_states import ModelStates
from services.worker.forward.capture import Capture
from services.worker.forward.forward_context import AttentionMetadata, DpMetadata, ForwardContext, forward_context
from services.worker.forward.state_cache import spare_slots
from services.worker.layout import RankLayout
from services.worker.ops import DecodeRows, DrawRows


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """How graphs are captured."""

    capture: Capture
    batch_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepFunctions:
    """The computations that are captured."""

    forward: Callable[[Tensor, Tensor], Tensor]
    """`CausalLM.forward`."""
    draw: Callable[[Tensor, DrawRows], Tensor]
    """Maps hidden states [n, hidden] and how their rows are drawn to tokens, as `Sampler.draw`."""
    make_context: Callable[[AttentionMetadata, DpMetadata], ForwardContext]
    """Makes the context of a forward pass with this metadata."""
    states: ModelStates | None = None
    """States of a model with recurrent layers."""


class Replays:
    """One computation, captured for each batch size.

    A capture computes, so all ranks of its collectives must capture at the same point. A TP group's ranks do when an
    epoch begins; of coupled groups an epoch may reach only some, so they capture in a step, anew in each epoch.
    """

    def __init__(
        self, capture: Capture, sizes: Sequence[int], compute: Callable[[int], Tensor], *, is_coupled: bool = False
    ) -> None:
        """Capture `compute`, which takes a batch size, for all `sizes` or for the smallest; nothing if coupled.

        Raises:
            NotRepeatableError: it cannot be captured.
        """
        self._capture = capture
        self._compute = compute
        self._replays: dict[int, Callable[[], Tensor]] = {}
        if not is_coupled:
            for size in sorted(sizes, reverse=True) if capture.is_ahead else sizes[:1]:
                self.capture(size)

    def __contains__(self, size: int) -> bool:
        """Whether it is captured."""
        return size in self._replays

    def __call__(self, size: int) -> Tensor:
        """Compute, with a size of `sizes`; the result is as in `Capture.__call__`."""
        if size not in self._replays:
            self.capture(size)
        return self._replays[size]()

    def capture(self, size: int) -> None:
        """Capture this size, as the constructor."""
        # A collection during a capture may free device memory, which ends the capture.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.inference_mode():
                self._replays[size] = self._capture(partial(self._compute, size))
        finally:
            if was_enabled:
                gc.enable()


@dataclass(frozen=True, slots=True)
class PaddedInputs:
    """Static inputs of decodes in which every sequence has equally many tokens; see `AttentionMetadata`."""

    token_ids: Tensor  # [num_seqs * tokens of each] int64
    positions: Tensor  # likewise
    slot_mapping: Tensor  # likewise
    context_lens: Tensor  # [num_seqs] int32
    block_tables: Tensor  # [num_seqs, the most blocks of one] int32


class PaddedGraphs:
    """Replays decodes of as many tokens for each sequence, padded to a captured batch size, from static inputs.

    A padded sequence's results are garbage, and reach no other one.
    """

    def __init__(
        self,
        functions: StepFunctions,
        settings: GraphSettings,
        layout: RankLayout,
        *,
        sizes: Sequence[int],
        inputs: PaddedInputs,
        longest: int,
    ) -> None:
        """Capture a graph for each of `sizes`, or for the smallest of them; coupled ranks later, see `Replays`.

        Args:
            inputs: Those of the largest size; until they are written they are padding.
            longest: A bound for every context, padding included.

        Raises:
            NotRepeatableError: the model's decodes cannot be captured.
        """
        self.sizes = tuple(sizes)
        size = max(self.sizes, default=0)
        self._functions = functions
        self._inputs = inputs
        self._capture = settings.capture
        self._longest = longest if settings.capture.is_recorded else None
        self._num_coupled = layout.dp_size if layout.is_coupled else 0
        self._num_tokens = len(inputs.token_ids) // max(size, 1)
        self._cu_seqlens_q = torch.arange(size + 1, dtype=torch.int32, device=inputs.token_ids.device)
        self._cu_seqlens_q *= self._num_tokens
        states = None if functions.states is None else functions.states.cache
        self._state_slots = None if states is None else spare_slots(states, size)
        self._spare_slots = None if states is None else spare_slots(states, size)
        self._forwards = Replays(self._capture, self.sizes, self._forward, is_coupled=layout.is_coupled)

    def size_for(self, num_seqs: int) -> int | None:
        """The smallest captured batch size that holds so many sequences; None if it is too large for all."""
        return size_for(self.sizes, num_seqs)

    def replay(self, size: int, slots: Tensor) -> Tensor:
        """Compute a decode from the inputs: hidden states [all tokens, hidden], which the next call may overwrite.

        Args:
            slots: [num_seqs] int64, whose recurrent states the first sequences continue, if the model has any.
        """
        if size not in self._forwards:
            # A capture computes, and a state must not take its token in twice.
            self._use_states(slots[:0])
            # No step has run from a graph before, so the rows that this size has not are still padding.
            for each in reversed(self.sizes) if self._capture.is_ahead else (size,):
                self._forwards.capture(each)
        self._use_states(slots)
        return self._forwards(size)

    def _use_states(self, slots: Tensor) -> None:
        """Let the first sequences have the states of these slots, and the others that of padding."""
        if self._state_slots is not None and self._spare_slots is not None:
            self._state_slots.copy_(self._spare_slots)
            self._state_slots[: len(slots)].copy_(slots)

    def _forward(self, size: int) -> Tensor:
        num_tokens, inputs = size * self._num_tokens, self._inputs
        metadata = decode_metadata(
            inputs.slot_mapping[:num_tokens],
            inputs.block_tables[:size],
            inputs.context_lens[:size],
            self._cu_seqlens_q[: size + 1],
            longest=self._longest,
        )
        metadata = replace(metadata, state_slots=None if self._state_slots is None else self._state_slots[:size])
        context = self._functions.make_context(metadata, DpMetadata((size,) * self._num_coupled, num_tokens))
        with forward_context(self._in_context(context)):
            return self._functions.forward(inputs.token_ids[:num_tokens], inputs.positions[:num_tokens])

    def _in_context(self, context: ForwardContext) -> ForwardContext:
        """The context of a pass, from what every one has."""
        return context


class DecodeGraphs(PaddedGraphs):
    """Replays decode steps of one token per sequence.

        `DecodeRows`        rows 0 … n - 1 of the step     rows n … size - 1: padding
        token_ids           last tokens                    0
        slot_mapping        slots                          -1: nothing is stored
        context_lens        lengths                        1
        block_tables        blocks                         0: reads whatever block 0 holds
        state slots         slots                          the spare one

    A second graph per batch size draws the tokens; those of a step with options are drawn eagerly instead.
    """

    def __init__(
        self,
        functions: StepFunctions,
        limits: BatchLimits,
        settings: GraphSettings,
        device: torch.device,
        *,
        layout: RankLayout,
    ) -> None:
        """Capture what a batch within `limits` can need; tokens are drawn too if there is a device of its own.

        Raises as `PaddedGraphs`.
        """
        sizes = needed_sizes(settings.batch_sizes, limits.max_num_seqs)
        size = sizes[-1]
        rows = self._rows = DecodeRows.padding(size, -(-limits.context_length // limits.block_size), device)
        self.draw_rows = DrawRows.greedy(max(size, limits.max_num_seqs), device)
        """How the rows of a decode are drawn, but for their positions; the first of them are to be written."""
        inputs = PaddedInputs(rows.token_ids, rows.positions, rows.slot_mapping, rows.context_lens, rows.block_tables)
        super().__init__(functions, settings, layout, sizes=sizes, inputs=inputs, longest=limits.context_length)
        self._drawings: Replays | None = None
        if self._capture.has_device:
            if not layout.is_coupled:
                # What is drawn from: a capture's results are always in the same place.
                self._hidden = self._forwards(size)
            self._drawings = Replays(self._capture, self.sizes, self._draw, is_coupled=layout.is_coupled)

    def rows(self, size: int) -> DecodeRows:
        """The inputs of the graph of this size, padding included, to be written before `replay`."""
        return self._rows.first(size)

    @override
    def replay(self, size: int, slots: Tensor) -> Tensor:
        self._hidden = super().replay(size, slots)
        return self._hidden

    @property
    def draws_tokens(self) -> bool:
        """Whether there is `draw`."""
        return self._drawings is not None

    def draw(self, size: int) -> Tensor:
        """Draw the tokens of the decode that `replay` has computed, from `draw_rows`: [size] int64, as `replay`."""
        assert self._drawings is not None, "tokens are not drawn by graphs"
        return self._drawings(size)

    def _draw(self, size: int) -> Tensor:
        rows = replace(self.draw_rows.first(size), position=self._rows.draw_positions[:size])
        return self._functions.draw(self._hidden[:size], rows)


def decode_metadata(
    slot_mapping: Tensor, block_tables: Tensor, context_lens: Tensor, cu_seqlens_q: Tensor, *, longest: int | None
) -> AttentionMetadata:
    """The metadata of a decode in which all sequences have equally many tokens; see `AttentionMetadata`.

    Args:
        longest: A bound for every context, for a replay that does not run Python; None reads `context_lens`.
    """
    size = len(context_lens)
    query_len = len(slot_mapping) // size
    host_lengths = tuple(context_lens.tolist()) if longest is None else (longest,) * size
    return AttentionMetadata(
        is_prefill=False,
        slot_mapping=slot_mapping,
        block_tables=block_tables,
        context_lens=context_lens,
        cu_seqlens_q=cu_seqlens_q,
        query_lens=(query_len,) * size,
        context_lens_host=host_lengths,
        max_query_len=query_len,
        max_context_len=max(host_lengths),
    )


def size_for(sizes: Sequence[int], num_rows: int) -> int | None:
    """The smallest of `sizes`, which ascend, that holds `num_rows`; None if all are smaller."""
    place = bisect_left(sizes, num_rows)
    return sizes[place] if place < len(sizes) else None


def needed_sizes(batch_sizes: Sequence[int], max_num_seqs: int) -> list[int]:
    """The sizes, ascending, that batches of up to `max_num_seqs` rows need."""
    ascending = sorted(set(batch_sizes))
    return ascending[: bisect_left(ascending, max_num_seqs) + 1]
