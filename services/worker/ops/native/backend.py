"""The `native` backend: what its own kernels compute, and the `cpu` backend's torch kernels for the rest."""

from __future__ import annotations

import logging

import torch

from services.worker.ops.cpu_ops import CpuOps
from services.worker.ops.native.build import BuildError
from services.worker.ops.native.isa import Isa, available_isas
from services.worker.ops.native.library import load_library
from services.worker.ops.protocol import Ops

logger = logging.getLogger(__name__)


class NativeOps(CpuOps):
    """See `Ops`. A row's bits depend on its batch."""

    name = "native"
    is_exact = False

    def __init__(self, isa: Isa) -> None:
        """Raise `BuildError` if the kernels for `isa` cannot be built."""
        super().__init__()
        self._isa = isa
        self._library = load_library(isa)

    def numerics(self) -> str:
        """See `Ops.numerics`."""
        return f"native {self._isa.value} threads-{torch.get_num_threads()} {super().numerics()}"


def load_native_ops() -> Ops:
    """The backend for this machine's best instructions; where it cannot be built, `cpu` with a warning."""
    isas = available_isas()
    if not isas:
        logger.warning("no kernels for this processor: the cpu backend takes over")
        return CpuOps()
    try:
        return NativeOps(isas[-1])
    except BuildError as error:
        logger.warning("the kernels cannot be built: the cpu backend takes over", extra={"error": str(error)})
        return CpuOps()
