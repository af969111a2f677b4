"""Copies a step's arrays from the host to the device, and its tokens back."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

HostArrays = dict[str, npt.NDArray[Any]]
"""Arrays of one transfer to the device, by name."""

# Every dtype may begin here.
_ALIGNMENT = 16
_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}


def to_device(values: npt.NDArray[np.generic[Any]], device: torch.device) -> Tensor:
    """A tensor of `values` on a device; on the CPU it shares their memory. Waits for a device of its own."""
    return torch.from_numpy(values).to(device)


def upload_arrays(arrays: HostArrays, device: torch.device) -> dict[str, Tensor]:
    """Copies of int32, int64 or float32 arrays on a device, in one transfer that the host does not wait for.

    On the CPU they share the arrays' memory.
    """
    # torch keeps a pinned piece of memory that is no longer used until copies from it are done.
    is_host = device.type == "cpu"
    staging = SharedStaging() if is_host else PinnedStaging(device, is_pinned=device.type == "cuda")
    staging.pack(arrays, num_values=0)
    return staging.upload()


class Staging(Protocol):
    """The arrays of one step on their way to the device, and its tokens on their way back.

    `pack` belongs to the launch; `upload` and `download` to the step's work on the device; `read` is called after it.
    """

    def pack(self, arrays: HostArrays, *, num_values: int) -> None:
        """Take in arrays of int32, int64 or float32; `num_values` is what will be downloaded."""

    def upload(self) -> dict[str, Tensor]:
        """The arrays on the device."""

    def download(self, values: Tensor) -> None:
        """Copy `values` [num_values] int64 to the host."""

    def read(self) -> npt.NDArray[np.int64]:
        """What was downloaded. It belongs to the caller."""


class SharedStaging:
    """Where the host is the device: nothing is copied. See `Staging`."""

    def __init__(self) -> None:
        self._arrays: HostArrays = {}
        self._values: Tensor | None = None

    def pack(self, arrays: HostArrays, *, num_values: int) -> None:  # noqa: ARG002
        """See `Staging`; the arrays must not be written afterwards."""
        self._arrays = arrays

    def upload(self) -> dict[str, Tensor]:
        """See `Staging`."""
        return {name: torch.from_numpy(values) for name, values in self._arrays.items()}

    def download(self, values: Tensor) -> None:
        """See `Staging`; `values` must not be written afterwards."""
        self._values = values

    def read(self) -> npt.NDArray[np.int64]:
        """See `Staging`."""
        assert self._values is not None, "nothing was downloaded"
        values: npt.NDArray[np.int64] = self._values.numpy()
        return values


class PinnedStaging:
    """One piece of host memory each way, so that a step needs one transfer to the device and one back. See `Staging`.

    It may serve another step only when the work of this one is done and its tokens were read.
    """

    def __init__(self, device: torch.device, *, is_pinned: bool) -> None:
        """Memory that is not pinned cannot be copied while the host goes on: for devices that are threads."""
        self._device = device
        self._is_pinned = is_pinned
        self._outgoing = torch.empty(0, dtype=torch.uint8)
        self._incoming = torch.empty(0, dtype=torch.int64)
        self._places: list[tuple[str, int, npt.NDArray[Any]]] = []
        self._num_bytes = 0
        self._num_values = 0

    def pack(self, arrays: HostArrays, *, num_values: int) -> None:
        """See `Staging`."""
        self._places, self._num_bytes, self._num_values = [], 0, num_values
        for name, values in arrays.items():
            self._places.append((name, self._num_bytes, values))
            self._num_bytes += -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT
        # Twice as much as needed: steps vary, and pinning takes long.
        if self._num_bytes > self._outgoing.nbytes:
            self._outgoing = self._allocate(2 * self._num_bytes, torch.uint8)
        if num_values > len(self._incoming):
            self._incoming = self._allocate(2 * num_values, torch.int64)
        memory = self._outgoing.numpy()
        for _, start, values in self._places:
            memory[start : start + values.nbytes].view(values.dtype)[:] = values.ravel()

    def upload(self) -> dict[str, Tensor]:
        """See `Staging`."""
        there = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        there.copy_(self._outgoing[: self._num_bytes], non_blocking=True)
        return {
            name: there[start : start + values.nbytes].view(_DTYPES[values.dtype]).view(values.shape)
            for name, start, values in self._places
        }

    def download(self, values: Tensor) -> None:
        """See `Staging`."""
        self._incoming[: self._num_values].copy_(values, non_blocking=True)

    def read(self) -> npt.NDArray[np.int64]:
        """See `Staging`."""
        values: npt.NDArray[np.int64] = self._incoming[: self._num_values].numpy().copy()
        return values

    def _allocate(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=self._is_pinned)
