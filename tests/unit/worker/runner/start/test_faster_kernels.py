"""A worker says what would be faster on its machine, and why it does not use it."""

from __future__ import annotations

import re

import pytest

from services.worker.device import DeviceRequest
from services.worker.runner.start.faster_kernels import Machine, describe_faster, library_versions

CPU = Machine(has_gpu=False, torch_build="cpu", isas=("avx2", "avx512"))
ARM = Machine(has_gpu=False, torch_build="cpu")
NVIDIA = Machine(has_gpu=True, torch_build="cuda", isas=("avx2",))
MI300 = Machine(has_gpu=True, torch_build="hip", architecture="gfx942", has_aiter=True, isas=("avx2",))
MI300_WITHOUT_AITER = Machine(has_gpu=True, torch_build="hip", architecture="gfx942", isas=("avx2",))
RADEON = Machine(has_gpu=True, torch_build="hip", architecture="gfx1100", has_aiter=True, isas=("avx2",))
GPU_UNUSED = Machine(has_gpu=True, torch_build="cpu", isas=("avx2",))


@pytest.mark.parametrize(
    ("machine", "device", "asked", "used", "instructions", "faster"),
    [
        (CPU, "auto", "auto", "native", "avx512", None),
        (CPU, "auto", "auto", "native", "avx2", "avx512 instructions: --native-isa is avx2"),
        (CPU, "auto", "auto", "cpu", "avx2", "native: its kernels cannot be built here; a warning above says why"),
        (CPU, "auto", "native", "cpu", "avx2", "native: its kernels cannot be built here; a warning above says why"),
        (CPU, "cpu", "reference", "reference", "avx2", "native: --ops-backend is reference"),
        (ARM, "auto", "auto", "cpu", "default", None),
        (GPU_UNUSED, "auto", "auto", "native", "avx2", "a GPU: torch is built for CPUs alone"),
        (GPU_UNUSED, "cpu", "auto", "native", "avx2", "a GPU: --device is cpu"),
        (MI300, "auto", "auto", "native", "avx2", "a GPU: torch is built for hip and sees none"),
    ],
)
def test_on_a_cpu(machine: Machine, device: str, asked: str, used: str, instructions: str, faster: str | None) -> None:
    request = DeviceRequest(device, 0, asked)
    assert describe_faster(request, machine, is_gpu=False, backend=used, instructions=instructions) == faster


@pytest.mark.parametrize(
    ("machine", "asked", "used", "faster"),
    [
        (NVIDIA, "auto", "triton", None),
        (NVIDIA, "triton-exact", "triton-exact", "triton: --ops-backend is triton-exact"),
        (MI300, "auto", "aiter", None),
        (MI300, "triton", "triton", "aiter: --ops-backend is triton"),
        (
            MI300_WITHOUT_AITER,
            "auto",
            "triton",
            "aiter: AITER is not installed, which is amd-aiter, not the package aiter",
        ),
        (RADEON, "auto", "triton", None),
    ],
)
def test_on_a_gpu(machine: Machine, asked: str, used: str, faster: str | None) -> None:
    request = DeviceRequest("auto", 0, asked)
    assert describe_faster(request, machine, is_gpu=True, backend=used, instructions="a GPU") == faster


def test_the_versions_are_those_of_the_kernels_libraries() -> None:
    assert re.fullmatch(r"torch-[\w.+]+", library_versions("native"))
    assert re.fullmatch(r"torch-[\w.+]+,triton-[\w.+]+", library_versions("triton"))
    assert re.fullmatch(r"aiter-\w[\w.+]*,torch-[\w.+]+,triton-[\w.+]+", library_versions("aiter"))
