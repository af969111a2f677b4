"""What the kernels' calls share."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from services.worker.ops.cpu.attention import GatherBuffers
from services.worker.ops.matrices import Matrix, dense
from services.worker.ops.native.packed import PackedMatrix
from services.worker.ops.native.results import Results
from services.worker.ops.prepared import KeptError, Packing, Prepared


class NativeState(GatherBuffers):
    """The compiled kernels, and what their calls leave for the calls after them."""

    def __init__(self, library: ctypes.CDLL, instructions: str) -> None:
        super().__init__()
        self.library = library
        self.results = Results()
        self.workspace = Workspace()
        self.instructions = instructions
        # The library's name is a digest of the kernels, the compiler and its flags.
        self.kernels = f"{instructions} kernels-{Path(library._name).stem}"
        self.packing = Packing(self.kernels)

    def pack(self, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> PackedMatrix:
        """Pack a matrix, unless it was kept packed; see `PackedMatrix`."""
        return PackedMatrix(self.library, weight, bias, dtype, self.packing.keep)

    def keep_table(self, weight: Matrix, dtype: torch.dtype) -> Tensor:
        """The dense matrix, contiguous.

        Raises:
            KeptError: what was kept is another one.
        """
        (table,) = self.packing.keep(lambda: Prepared((), (dense(weight, dtype),))).tensors
        if table is None or table.shape != torch.Size(weight.shape) or table.dtype is not dtype:
            raise KeptError(f"another table than {list(weight.shape)} {dtype}")
        return table


class Workspace:
    """Memory for one call of the kernel at a time, grown to the largest."""

    def __init__(self) -> None:
        self.scratch = torch.empty(0)
        self.partials = torch.empty(0)
        self.counters = torch.zeros(0, dtype=torch.int32)
        """0 between calls."""

    def grow(self, *, scratch: int, partials: int, counters: int) -> None:
        """Make the tensors at least this long."""
        if len(self.scratch) < scratch:
            self.scratch = torch.empty(scratch)
        if len(self.partials) < partials:
            self.partials = torch.empty(partials)
        if len(self.counters) < counters:
            # Not zeroed by torch, whose work a capture refuses.
            self.counters = torch.from_numpy(np.zeros(counters, np.int32))
