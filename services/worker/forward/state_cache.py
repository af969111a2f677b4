"""Recurrent states: what a sequence keeps of all its tokens together, in layers that have no keys and values.

row             0 … num_slots - 1                 num_slots
state of        slots, each one sequence's        padding and dummies, which no sequence reads
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.forward.kv_cache import zeros

# Every dtype may begin here, and whole rows are copied as float32.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a layer: what a sequence keeps in it, or a token brings."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its bytes, with what aligns the next one."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


LayerState = tuple[StateTensor, ...]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What one sequence keeps, by layer."""

    layers: tuple[LayerState, ...] = ()
    """Empty for a layer without a state; no layers at all for a model without."""
    inputs: tuple[LayerState, ...] = ()
    """What each layer takes in of a token, for models whose tokens may be drafts."""

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a sequence in all layers; 0 for a model without states."""
        return sum(tensor.num_bytes for layer in self.layers for tensor in layer)

    @property
    def input_bytes_per_token(self) -> int:
        """Bytes of what all layers take in of a token."""
        return sum(tensor.num_bytes for layer in self.inputs for tensor in layer)


NO_STATES = StateSpec()
"""What a model without recurrent layers keeps."""


class StateCache:
    """The states of `num_slots` slots, zeroed at start, written and read by `Ops`.

    `layers[i]` has layer i's tensors in the order of its `LayerState`, each [num_slots + 1, *shape]. A slot's part of a
    tensor is contiguous; slots lie further apart, as all of a slot's tensors lie side by side.

    Invariant: a slot that a sequence begins in was cleared or restored before its first token, whatever it held.
    """

    def __init__(self, spec: StateSpec, num_slots: int, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.num_slots = num_slots
        self.device = torch.device(device)
        size = spec.bytes_per_slot
        self._slots = zeros((num_slots + 1, size // torch.float32.itemsize), torch.float32, self.device)
        layers, start = [], 0
        for layer in spec.layers:
            tensors = []
            for tensor in layer:
                tensors.append(self._view(start, tensor))
                start += tensor.num_bytes
            layers.append(tuple(tensors))
        self.layers: tuple[tuple[Tensor, ...], ...] = tuple(layers)

    @property
    def spare_slot(self) -> int:
        """The row of padding and dummies."""
        return self.num_slots

    def begin_sequences(self, changes: dict[str, Tensor]) -> None:
        """Clear and restore the states of sequences that enter, if there are any; see `state_changes`."""
        if "cleared_states" in changes:
            self.clear(changes["cleared_states"])
        if "restored_from" in changes:
            self.copy(changes["restored_from"], changes["restored_to"])

    def clear(self, slots: Tensor) -> None:
        """Zero the states of `slots` [n] int64."""
        self._slots.index_fill_(0, slots, 0.0)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the states of `sources` [n] int64 to `targets` [n] int64, which have no repeats."""
        self._slots.index_copy_(0, targets, self._slots.index_select(0, sources))

    def save(self, sources: Tensor, targets: Tensor) -> Tensor:
        """Copy as `copy` does: [n] int32, 1 where a state is not finite."""
        states = self._slots.index_select(0, sources)
        self._slots.index_copy_(0, targets, states)
        # NaN is both the largest and the smallest value. `isfinite` of all would take three times as long as the copy.
        is_finite = states.amax(1).isfinite() & states.amin(1).isfinite()
        return is_finite.logical_not().to(torch.int32)

    def _view(self, start: int, tensor: StateTensor) -> Tensor:
        size = tensor.dtype.itemsize
        whole = self._slots.view(tensor.dtype)
        part = whole[:, start // size : start // size + math.prod(tensor.shape)]
        return part.view(len(part), *tensor.shape)


def spare_slots(states: StateCache, num_rows: int) -> Tensor:
    """[num_rows] int64: the row of padding for each."""
    return torch.full((num_rows,), states.spare_slot, dtype=torch.int64, device=states.device)
