"""Recurrent states of sequences with drafts: a state takes in a token only once that is known to be accepted.

A state cannot go back to before a draft that is rejected. So a step that checks drafts computes its decodes from copies
of their states, and keeps what its layers take in of each token. The drafts are judged at the end of the same step, and
the inputs of the tokens that count are then replayed over the states themselves:

    a row's tokens    t  d0 d1 d2     t was drawn last
    computed          t  d0 d1 d2     from a copy of the state, of which nothing is kept
    drawn             x0 x1 …         x0 == d0 and x1 != d1, so d0 is accepted
    replayed          t  d0           the state is now that after exactly these tokens

Between steps, then, every state is that after all of its sequence's tokens but the newest, with drafts as without.
Replaying at once, rather than in the next step, lets a step's saves, and a sequence that leaves, see nothing else. The
inputs of n tokens are small beside n + 1 states: 16 KiB a token and 2 MiB a state in a layer of Qwen3-Next.

Source: ATOM's replay of accepted drafts over recurrent states, for the idea.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from services.worker.forward.forward_context import AttentionMetadata, StateInputs, TakeIn
from services.worker.forward.staging import is_on_host
from services.worker.forward.state_cache import StateCache, StateSpec


def drafted_bytes(spec: StateSpec, *, num_rows: int, num_tokens: int) -> int:
    """Memory of `DraftedStates`."""
    copies = sum(StateSpec((layer,)).bytes_per_slot for layer in set(spec.layers))
    return num_rows * copies + num_tokens * spec.input_bytes_per_token


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """The sequences of a pass that computes drafts, as its recurrent layers see them."""

    num_tokens: int
    """Tokens of decodes and of their drafts, which come first."""
    decodes: AttentionMetadata
    others: AttentionMetadata | None
    """The chunks of prompts after them, whose tokens all count; None if there are none."""

    @classmethod
    def split(cls, step: AttentionMetadata, num_decodes: int) -> DraftedRows:
        """The parts of a step, of which the first `num_decodes` sequences, at least 1, are decodes."""
        lengths = step.query_lens
        num_tokens, slots = sum(lengths[:num_decodes]), _slots(step)
        decodes = replace(
            step,
            is_prefill=False,
            cu_seqlens_q=step.cu_seqlens_q[: num_decodes + 1],
            query_lens=lengths[:num_decodes],
            max_query_len=max(lengths[:num_decodes]),
            state_slots=slots[:num_decodes],
        )
        if num_decodes == len(lengths):
            return cls(num_tokens, decodes, None)
        others = replace(
            step,
            cu_seqlens_q=step.cu_seqlens_q[num_decodes:] - num_tokens,
            query_lens=lengths[num_decodes:],
            max_query_len=max(lengths[num_decodes:]),
            state_slots=slots[num_decodes:],
        )
        return cls(num_tokens, decodes, others)


class DraftedStates:
    """What a pass with drafts computes its recurrent layers from, and leaves for the end of its step.

    Invariant: the states of sequences that such a pass decodes are written by `replay` alone.
    """

    def __init__(self, states: StateCache, *, num_rows: int, num_tokens: int) -> None:
        """Make room for so many decodes, which have so many tokens together with their drafts."""
        self._states = states
        device, spec = states.device, states.spec
        self._rows = torch.arange(num_rows, device=device)
        # One layer's at a time, so layers that are alike share them.
        self._copies = {
            layer: StateCache(StateSpec((layer,)), num_rows, device).layers[0] for layer in set(spec.layers) if layer
        }
        self._inputs = [
            tuple(torch.empty((num_tokens, *each.shape), dtype=each.dtype, device=device) for each in layer)
            for layer in spec.inputs
        ]
        self._num_tokens = num_tokens
        self._functions: dict[int, TakeIn] = {}

    def of_pass(self, rows: DraftedRows) -> StateInputs:
        """What the layers of one pass call."""
        return _Pass(self, rows)

    def take_in(self, rows: DraftedRows, layer: int, inputs: tuple[Tensor, ...], function: TakeIn) -> Tensor:
        """Compute a layer with `function`, without keeping what becomes of the decodes' states."""
        num_tokens, decodes = rows.num_tokens, rows.decodes
        states, slots = self._states.layers[layer], _slots(decodes)
        copies = self._copies[self._states.spec.layers[layer]]
        ours = self._rows[: len(slots)]
        for copy, state in zip(copies, states, strict=True):
            torch.index_select(state, 0, slots, out=copy[: len(slots)])
        for kept, each in zip(self._inputs[layer], inputs, strict=True):
            kept[:num_tokens].copy_(each[:num_tokens])
        self._functions[layer] = function
        read = function(tuple(each[:num_tokens] for each in inputs), copies, replace(decodes, state_slots=ours))
        if rows.others is None:
            return read
        return torch.cat((read, function(tuple(each[num_tokens:] for each in inputs), states, rows.others)))

    def replay(self, slots: Tensor, *, firsts: Tensor, counts: Tensor, most: int) -> None:
        """Let states take in tokens of the last pass. The host does not wait for it.

        Args:
            slots: [num_rows] int64, the states, without repeats; at least one.
            firsts: [num_rows] int64, the first token of each among those of the pass.
            counts: [num_rows] int64, how many consecutive tokens of each, at least 0.
            most: At least the sum of `counts`.
        """
        lengths: tuple[int, ...] = (most,) * len(slots)
        if is_on_host(counts):
            # The kernels of a host are told how many tokens there are, of each sequence at least one.
            slots, firsts, counts = (each[counts > 0] for each in (slots, firsts, counts))
            lengths = tuple(counts.tolist())
            most = sum(lengths)
        if not most:
            return
        starts = torch.zeros(len(slots) + 1, dtype=torch.int64, device=slots.device)
        torch.cumsum(counts, 0, out=starts[1:])
        taken_in = torch.arange(most, device=slots.device)
        # What comes after the last token is taken in by no state.
        rows = torch.searchsorted(starts[1:], taken_in, right=True).clamp_(max=len(slots) - 1)
        places = (taken_in + (firsts - starts[:-1])[rows]).clamp_(max=self._num_tokens - 1)
        accepted = _without_attention(slots, starts.int(), lengths)
        for layer, function in self._functions.items():
            inputs = tuple(each.index_select(0, places) for each in self._inputs[layer])
            function(inputs, self._states.layers[layer], accepted)


class ModelStates(NamedTuple):
    """What a model with recurrent layers keeps between steps, and within one."""

    cache: StateCache
    drafted: DraftedStates | None
    """None where no tokens are drafted."""


@dataclass(frozen=True, slots=True)
class _Pass(StateInputs):
    states: DraftedStates
    rows: DraftedRows

    @override
    def take_in(self, layer: int, inputs: tuple[Tensor, ...], function: TakeIn) -> Tensor:
        return self.states.take_in(self.rows, layer, inputs, function)


def _without_attention(slots: Tensor, starts: Tensor, lengths: tuple[int, ...]) -> AttentionMetadata:
    """What recurrent layers need to know of some tokens."""
    none = starts[:0]
    return AttentionMetadata(
        is_prefill=False,
        slot_mapping=none,
        block_tables=none,
        context_lens=none,
        cu_seqlens_q=starts,
        query_lens=lengths,
        context_lens_host=(),
        max_query_len=max(lengths),
        max_context_len=0,
        state_slots=slots,
    )


def _slots(metadata: AttentionMetadata) -> Tensor:
    assert metadata.state_slots is not None, "the model has states"
    return metadata.state_slots
