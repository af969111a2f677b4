"""The `native` backend: what its own kernels compute, and the `cpu` backend's torch kernels for the rest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from services.worker.device import DeviceError
from services.worker.forward.capture import Capture
from services.worker.forward.kv_cache import LayerCache
from services.worker.ops.cpu.backend import CpuOps
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.native.attention import NativeAttention
from services.worker.ops.native.build import BuildError
from services.worker.ops.native.capture import NativeCapture
from services.worker.ops.native.draw import NativeDraws
from services.worker.ops.native.elementwise import NativeElementwise
from services.worker.ops.native.experts import NativeExpertOps
from services.worker.ops.native.formats import FORMATS
from services.worker.ops.native.heads import NativeHeads
from services.worker.ops.native.isa import Isa, available_isas
from services.worker.ops.native.library import load_library
from services.worker.ops.native.products import NativeProducts
from services.worker.ops.native.results import Results
from services.worker.ops.protocol import Ops

logger = logging.getLogger(__name__)


class NativeOps(NativeProducts, NativeExpertOps, NativeDraws, NativeElementwise, NativeHeads, NativeAttention, CpuOps):
    """See `Ops`. A row's bits depend on its batch."""

    name = "native"
    is_exact = False
    formats = frozenset({MatrixFormat.INT8, MatrixFormat.INT4, MatrixFormat.MXFP4})
    automatic_quantization = MatrixFormat.INT8
    kv_dtypes = tuple(FORMATS)

    def __init__(self, isa: Isa) -> None:
        """Raise `BuildError` if the kernels for `isa` cannot be built."""
        super().__init__()
        self.instructions = isa.value
        # Perplexity rises by 0.1 % with bfloat16, whether weights are quantised or not.
        self.automatic_dtype = torch.bfloat16 if isa is Isa.AVX512_BF16 else torch.float32
        self._isa = isa
        self._library = load_library(isa)
        self._results = Results()

    @property
    def num_threads(self) -> int:
        """See `Ops.num_threads`."""
        return int(self._library.ls_num_threads())

    def use_threads(self, count: int) -> None:
        """See `Ops.use_threads`. One pool: torch's kernels, which are small here, run on the caller's thread."""
        self._library.ls_set_num_threads(count)
        torch.set_num_threads(1)

    def make_capture(self, device: torch.device, layers: Sequence[LayerCache]) -> Capture:  # noqa: ARG002
        """See `Ops.make_capture`."""
        return NativeCapture(self._library, self._results)

    def numerics(self) -> str:
        """See `Ops.numerics`."""
        # The library's name is a digest of the kernels, the compiler and its flags.
        kernels = f"{self._isa.value} kernels-{Path(self._library._name).stem}"
        return f"native torch-{torch.__version__} {kernels} pool-{self.num_threads} {super().numerics()}"


def load_native_ops(isa_name: str) -> Ops:
    """The backend for an `Isa`, or with `auto` for this machine's best; where it cannot be built, `cpu` with a warning.

    Raises:
        DeviceError: the processor does not have the instructions that `isa_name` asks for.
    """
    isas = available_isas()
    if isa_name != "auto":
        isas = [isa for isa in isas if isa.value == isa_name]
        if not isas:
            raise DeviceError(f"--native-isa {isa_name}: this processor does not have these instructions")
    if not isas:
        logger.warning("no kernels for this processor: the cpu backend takes over")
        return CpuOps()
    try:
        return NativeOps(isas[-1])
    except BuildError as error:
        logger.warning("the kernels cannot be built: the cpu backend takes over", extra={"error": str(error)})
        return CpuOps()
