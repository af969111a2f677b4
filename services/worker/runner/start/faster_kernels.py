"""Whether this machine has something faster than what a worker computes with, and why that is not used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Literal

import torch

from services.worker.device import AITER_GPUS, DeviceChoice, DeviceRequest, gpu_architecture, has_aiter, has_gpu_node
from services.worker.ops.native.isa import available_isas

# The libraries that each backend's kernels are from, by their modules' names.
_LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "aiter": ("aiter", "torch", "triton"),
    "cpu": ("torch",),
    "native": ("torch",),
    "reference": ("torch",),
    "triton": ("torch", "triton"),
    "triton-exact": ("torch", "triton"),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to compute with."""

    has_gpu: bool
    """Whether the system has a GPU's device file."""
    torch_build: Literal["cpu", "cuda", "hip"]
    """What torch is built for."""
    architecture: str | None = None
    """The architecture of the worker's GPU if it is AMD's; None on NVIDIA's and on a CPU."""
    has_aiter: bool = False
    isas: tuple[str, ...] = ()
    """The sets of instructions that the native kernels can use here, ascending."""


def look_at_machine(choice: DeviceChoice) -> Machine:
    """Find out what the machine of a worker's device has."""
    build: Literal["cpu", "cuda", "hip"] = "cpu"
    if torch.version.cuda is not None or torch.version.hip is not None:
        build = "cuda" if torch.version.hip is None else "hip"
    is_amd = build == "hip" and choice.device.type == "cuda"
    return Machine(
        has_gpu=has_gpu_node(),
        torch_build=build,
        architecture=gpu_architecture(choice.device.index) if is_amd else None,
        has_aiter=has_aiter(),
        isas=tuple(isa.value for isa in available_isas()),
    )


def describe_faster(
    request: DeviceRequest, machine: Machine, *, is_gpu: bool, backend: str, instructions: str
) -> str | None:
    """What would be faster and why it is not used; None if nothing is known to be.

    Args:
        is_gpu: Whether the worker computes on a GPU.
        backend: What it computes with, which is not what was chosen if that could not be built.
        instructions: What its kernels are compiled for.
    """
    if not is_gpu and machine.has_gpu:
        return f"a GPU: {_why_no_gpu(request, machine)}"
    best = _best_backend(machine, is_gpu=is_gpu)
    if best is not None and backend != best:
        return f"{best}: {_why_not(best, request, machine)}"
    if backend == "native" and machine.isas and instructions != machine.isas[-1]:
        return f"{machine.isas[-1]} instructions: --native-isa is {instructions}"
    return None


def library_versions(backend: str) -> str:
    """The versions of the libraries that a backend's kernels are from, such as "torch-2.9.1,triton-3.5.1"."""
    return ",".join(f"{name}-{_version(name)}" for name in _LIBRARIES[backend])


def _version(name: str) -> str:
    if name != "aiter":
        return str(import_module(name).__version__)
    try:
        return metadata.version("amd-aiter")
    except metadata.PackageNotFoundError:
        return "unpacked"


def _best_backend(machine: Machine, *, is_gpu: bool) -> str | None:
    if not is_gpu:
        return "native" if machine.isas else None
    return "aiter" if machine.architecture in AITER_GPUS else "triton"


def _why_no_gpu(request: DeviceRequest, machine: Machine) -> str:
    if request.device == "cpu":
        return "--device is cpu"
    if machine.torch_build == "cpu":
        return "torch is built for CPUs alone"
    return f"torch is built for {machine.torch_build} and sees none"


def _why_not(best: str, request: DeviceRequest, machine: Machine) -> str:
    if request.ops_backend not in ("auto", best):
        return f"--ops-backend is {request.ops_backend}"
    if best == "aiter" and not machine.has_aiter:
        return "AITER is not installed, which is amd-aiter, not the package aiter"
    return "its kernels cannot be built here; a warning above says why"
