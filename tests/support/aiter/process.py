"""Processes in which AITER's wheel can be imported on a machine without ROCm.

Importing AITER changes the environment, runs ROCm's tools and defines operators for the whole process, so tests that
need it run in processes of their own.

AITER imports a built kernel by its module's name from the directory AITER_JIT_DIR, and checks its arguments against the
first line of its docstring, as pybind11 writes it. There it finds the stand-ins in torch of `standins`, which
have the kernels' layouts, write in place what those do, and refuse what those refuse or would misread. So they prove
which kernel is called with which arguments, but not what the kernels compute.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.support.aiter.wheel import aiter_dir
from tests.support.system.processes import module_environment

_STANDINS = Path(__file__).parent / "standins"
_HIP_VERSION = "6.4.43484"


def aiter_environment(directory: Path, *, with_standins: bool = True) -> dict[str, str]:
    """The variables with which a process can import AITER.

    Args:
        directory: Empty; gets a tool of ROCm, and the stand-ins, next to which AITER makes files.
        with_standins: Without them, all but the enumerations must be built, which fails.
    """
    tool = directory / "rocm" / "bin" / "hipconfig"
    tool.parent.mkdir(parents=True)
    tool.write_text(f"#!/bin/sh\necho {_HIP_VERSION}\n", encoding="utf-8")
    tool.chmod(0o755)
    kernels = directory / "kernels"
    kernels.mkdir()
    for path in _STANDINS.glob("module_*.py" if with_standins else "module_aiter_enum.py"):
        shutil.copy(path, kernels)
    return {
        "AITER_JIT_DIR": str(kernels),
        "ROCM_HOME": str(directory / "rocm"),
        "GPU_ARCHS": "gfx942",
        "CU_NUM": "304",
        "PYTHONPATH": os.pathsep.join([module_environment()["PYTHONPATH"], str(aiter_dir())]),
        "TRITON_INTERPRET": "1",
        # Stand-ins compute on the CPU, on any machine.
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
    }
