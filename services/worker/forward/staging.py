"""Copies a step's arrays from the host to the device, and its results back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

HostArrays = dict[str, npt.NDArray[Any]]
"""Arrays of one transfer to the device, by name."""

# Every dtype may begin here.
_ALIGNMENT = 16
_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}


def to_device(values: npt.NDArray[np.generic[Any]], device: torch.device) -> Tensor:
    """A tensor of `values` on a device, for which the host does not wait; on the CPU it shares their memory."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    # torch keeps a pinned piece of memory that is no longer used until copies from it are done.
    source = tensor.pin_memory() if device.type == "cuda" else tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(source, non_blocking=True)


def is_on_host(tensor: Tensor) -> bool:
    """Whether the host reads its values without waiting for a device."""
    return tensor.device.type == "cpu"


def upload_arrays(arrays: HostArrays, device: torch.device) -> dict[str, Tensor]:
    """Copies of int32, int64 or float32 arrays on a device, in one transfer that the host does not wait for.

    On the CPU they share the arrays' memory.
    """
    if device.type == "cpu":
        return SharedStaging(arrays).upload()
    staging = PinnedStaging(device, is_pinned=device.type == "cuda")
    staging.pack(arrays)
    return staging.upload()


class Staging(Protocol):
    """The arrays of one step on their way to the device, and its results on their way back.

    `upload` and `download` belong to the step's work on the device; `read` is called once, after it, and then the
    staging may serve another step.
    """

    def upload(self) -> dict[str, Tensor]:
        """The arrays on the device."""

    def download(self, results: Sequence[Tensor]) -> None:
        """Copy tensors to the host, once per step."""

    def read(self) -> list[npt.NDArray[Any]]:
        """What was downloaded. It belongs to the caller."""


@dataclass(slots=True)
class SharedStaging(Staging):
    """Staging where the host is the device: nothing is copied."""

    arrays: HostArrays
    """Not written any more."""
    _results: Sequence[Tensor] = ()

    @override
    def upload(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(values) for name, values in self.arrays.items()}

    def download(self, results: Sequence[Tensor]) -> None:
        """See `Staging`; they must not be written afterwards."""
        self._results = results

    @override
    def read(self) -> list[npt.NDArray[Any]]:
        return [result.numpy() for result in self._results]


class PinnedStaging(Staging):
    """One piece of host memory each way, so that a step needs one transfer to the device. See `Staging`."""

    def __init__(self, device: torch.device, *, is_pinned: bool) -> None:
        """Memory that is not pinned cannot be copied while the host goes on: for devices that are threads."""
        self._device = device
        self._is_pinned = is_pinned
        self.give_back: Callable[[PinnedStaging], None] = lambda _: None
        """Called once it was read."""
        self._outgoing = torch.empty(0, dtype=torch.uint8)
        self._incoming = torch.empty(0, dtype=torch.uint8)
        self._places: list[tuple[str, int, npt.NDArray[Any]]] = []
        self._num_bytes = 0
        # Views of `_incoming`.
        self._results: list[Tensor] = []

    def pack(self, arrays: HostArrays) -> None:
        """Take in arrays of int32, int64 or float32."""
        self._places, self._num_bytes, self._results = [], 0, []
        for name, values in arrays.items():
            self._places.append((name, self._num_bytes, values))
            self._num_bytes += _aligned(values.nbytes)
        self._outgoing = self._at_least(self._num_bytes, self._outgoing)
        memory = self._outgoing.numpy()
        for _, start, values in self._places:
            memory[start : start + values.nbytes].view(values.dtype)[:] = values.ravel()

    @override
    def upload(self) -> dict[str, Tensor]:
        there = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        there.copy_(self._outgoing[: self._num_bytes], non_blocking=True)
        return {
            name: there[start : start + values.nbytes].view(_DTYPES[values.dtype]).view(values.shape)
            for name, start, values in self._places
        }

    @override
    def download(self, results: Sequence[Tensor]) -> None:
        self._incoming = self._at_least(sum(_aligned(result.nbytes) for result in results), self._incoming)
        start = 0
        for result in results:
            here = self._incoming[start : start + result.nbytes].view(result.dtype).view(result.shape)
            self._results.append(here.copy_(result, non_blocking=True))
            start += _aligned(result.nbytes)

    @override
    def read(self) -> list[npt.NDArray[Any]]:
        results = [result.numpy().copy() for result in self._results]
        self.give_back(self)
        return results

    def _at_least(self, num_bytes: int, memory: Tensor) -> Tensor:
        if num_bytes <= memory.nbytes:
            return memory
        # Twice as much as needed: steps vary, and pinning takes long.
        return torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
