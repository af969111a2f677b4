"""What the backends with Triton's kernels share."""

from __future__ import annotations

import torch
import triton

from services.worker.device import DeviceError
from services.worker.ops.triton.products.fp8_rows import Fp8Encoding, device_encoding


class TritonState:
    """What the kernels run on, and what the rows of products are quantised to."""

    name: str

    def __init__(self) -> None:
        self.instructions = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter"
        self.encoding: Fp8Encoding | None = None
        """The FP8 of what is prepared from now on; None means that rows are not quantised."""


def numerics(state: TritonState) -> str:
    """Versions, the device, and whether rows are quantised."""
    activations = "" if state.encoding is None else " fp8-activations"
    return f"{state.name} torch-{torch.__version__} triton-{triton.__version__} {state.instructions}{activations}"


def quantize_activations(state: TritonState) -> None:
    """Quantise to the FP8 of the device."""
    state.encoding = device_encoding()


def check_triton(backend: str) -> None:
    """Check that a backend's kernels can run.

    Raises:
        DeviceError: there is no GPU, and the interpreter was not asked for by TRITON_INTERPRET=1.
    """
    if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
        raise DeviceError(f"--ops-backend {backend} needs a GPU")
