"""Which device a worker computes on, and what follows from it: kernels, step sizes."""

from __future__ import annotations

import importlib.util
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class DeviceError(Exception):
    """The worker cannot use the device that its settings name; the message says why."""


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """What the settings say about the device, `auto` included; see `WorkerSettings` for the values."""

    device: str
    index: int
    ops_backend: str


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """A device, with the choices that `auto` leaves to it."""

    device: torch.device
    ops_backend: str
    """A name for `load_ops`."""


@dataclass(frozen=True, slots=True)
class StepProposal:
    """Used when the scheduler has no step sizes configured."""

    num_prompt_tokens: int
    """Most prompt tokens in a step."""
    mixes: bool
    """Whether prompts and decodes share steps."""


AITER_GPUS = ("gfx942", "gfx950")
"""The architectures that the backend `aiter` has kernels for: MI300 and MI350."""

# A GPU computes this many tokens in a fraction of a second, at its full throughput.
_GPU_STEPS = StepProposal(16384, mixes=False)
# A CPU takes as long for 512 tokens as a GPU for all of the above, and more at once would not be faster. Decodes wait
# for every step, so each step includes them and stays this small.
_CPU_STEPS = StepProposal(512, mixes=True)


def choose_device(request: DeviceRequest) -> DeviceChoice:
    """Resolve every `auto`. Imports torch.

    Raises:
        DeviceError: there is no such device, or the CPU's kernels are asked for on a GPU.
    """
    import torch  # noqa: PLC0415 - the flags are checked without torch where there is no GPU

    is_gpu = request.device == "cuda" or (request.device == "auto" and has_gpu_node() and torch.cuda.is_available())
    if is_gpu:
        _check_gpu(torch.cuda.device_count() if torch.cuda.is_available() else 0, request.index)
    backend = request.ops_backend
    if backend == "auto":
        backend = _gpu_backend(request.index) if is_gpu else _cpu_backend()
    if is_gpu and backend == "native":
        raise DeviceError("--ops-backend native does not run on a GPU")
    device = torch.device("cuda", request.index) if is_gpu else torch.device("cpu")
    return DeviceChoice(device, backend)


def propose_steps(device_type: str) -> StepProposal:
    """Propose for a torch device type, such as "cpu" or "cuda"."""
    return _CPU_STEPS if device_type == "cpu" else _GPU_STEPS


def check_device(request: DeviceRequest) -> None:
    """Check the device before anything is started; takes seconds only where there may be a GPU.

    Raises:
        DeviceError: as from `choose_device`.
    """
    if request.device == "cuda" or (request.device == "auto" and has_gpu_node()):
        choose_device(request)


def gpu_architecture(index: int) -> str:
    """What the code of an AMD GPU is compiled for, such as "gfx942"."""
    import torch  # noqa: PLC0415 - as in `choose_device`

    name: str = torch.cuda.get_device_properties(index).gcnArchName
    return name.split(":", maxsplit=1)[0]


def _gpu_backend(index: int) -> str:
    import torch  # noqa: PLC0415 - as in `choose_device`

    can_use_aiter = torch.version.hip is not None and has_aiter()
    return "aiter" if can_use_aiter and gpu_architecture(index) in AITER_GPUS else "triton"


def has_aiter() -> bool:
    """Whether AMD's library is installed. An unrelated package of the same name has no such folder."""
    spec = importlib.util.find_spec("aiter")
    return spec is not None and any(Path(each, "jit").is_dir() for each in spec.submodule_search_locations or ())


def _cpu_backend() -> str:
    """`native` leaves it to `cpu` if it turns out that it cannot be built."""
    return "native" if platform.machine() == "x86_64" else "cpu"


def has_gpu_node() -> bool:
    """Whether the system has a GPU's device file, NVIDIA's or AMD's: without one, torch need not be asked."""
    return Path("/dev/kfd").exists() or any(Path("/dev").glob("nvidia[0-9]*"))


def _check_gpu(num_visible: int, index: int) -> None:
    if not num_visible:
        raise DeviceError("--device cuda: torch sees no GPU")
    if index >= num_visible:
        raise DeviceError(f"rank {index} on this machine has no GPU of its own: {num_visible} are visible")
