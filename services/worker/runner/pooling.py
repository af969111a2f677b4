"""Vectors of prompts: the last token's hidden state, or the mean of all tokens'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.batch.step_input import PooledChunk
from shared.request.sampling_params import Pooling

# Hidden states are added as whole numbers of 1 / _UNIT, which add up to the same in any order, so that neither chunks
# nor a device's way to add change a bit. float32 has no more digits for values above 2^-7, nor bfloat16 above 2^-23.
_UNIT = float(2**30)
# 2^16 tokens of this size still fit a sum.
_MOST = float(2**16)


@dataclass(frozen=True, slots=True)
class PromptVectors:
    """The vectors of a step's prompts, on the device."""

    slots: tuple[int, ...]
    values: Tensor
    """[num_slots, hidden] float32; NaN where a hidden state is not finite, or above 2^16."""


class PromptPooler:
    """Makes vectors of prompts, chunk by chunk.

    Invariant: while a prompt that is averaged is incomplete, the sum of its hidden states is kept, by slot. The next
    prompt that begins there drops one left over.
    """

    def __init__(self) -> None:
        self._slot_to_sum: dict[int, tuple[Tensor, Tensor]] = {}

    def pool(self, chunks: Sequence[PooledChunk], hidden: Tensor) -> PromptVectors | None:
        """Take in a step's chunks, which are from different slots; None if no prompt ends with one.

        Args:
            chunks: In the order of their tokens.
            hidden: [num_tokens, hidden], the states of the step's tokens; not written.
        """
        slots: list[int] = []
        vectors: list[Tensor] = []
        for chunk in chunks:
            states = hidden[chunk.first_token : chunk.first_token + chunk.num_tokens]
            sums = self._add(chunk, states) if chunk.pooling is Pooling.MEAN else None
            if chunk.has_later_tokens:
                if sums is not None:
                    self._slot_to_sum[chunk.slot] = sums
                continue
            slots.append(chunk.slot)
            vectors.append(states[-1].float() if sums is None else _mean(*sums, chunk.position + chunk.num_tokens))
        return PromptVectors(tuple(slots), torch.stack(vectors)) if slots else None

    def _add(self, chunk: PooledChunk, states: Tensor) -> tuple[Tensor, Tensor]:
        """The sum up to this chunk, in units, and which of its columns are usable."""
        wide = states.double()
        is_usable = (wide.abs() <= _MOST).all(0)
        units = (wide * _UNIT).round().masked_fill(~is_usable, 0.0).long().sum(0)
        before = self._slot_to_sum.pop(chunk.slot, None)
        if chunk.position == 0:
            return units, is_usable
        assert before is not None, "the prompt's previous chunk was not added"
        return before[0] + units, before[1] & is_usable


def _mean(units: Tensor, is_usable: Tensor, num_tokens: int) -> Tensor:
    mean = units.double() / (_UNIT * num_tokens)
    return mean.masked_fill(~is_usable, torch.nan).float()
