"""What the kernels' calls share."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from services.worker.ops.cpu.attention import GatherBuffers
from services.worker.ops.native.results import Results


class NativeState(GatherBuffers):
    """The compiled kernels, and what their calls leave for the calls after them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self.library = library
        self.results = Results()
        self.workspace = Workspace()


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
