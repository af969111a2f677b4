"""Every kernel compiles for the GPUs that we support, and fits them, with the shapes of published models."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.support.system.processes import ROOT

pytestmark = [pytest.mark.proof, pytest.mark.process, pytest.mark.timeout(1800)]

# The shared memory that one program may have, as Triton counts it.
SHARED_BYTES = {"sm_90": 227 * 1024, "gfx942": 64 * 1024, "gfx950": 160 * 1024}


@pytest.fixture(scope="module")
def targets(pytestconfig: pytest.Config) -> list[str]:
    """By default the one with the least shared memory; `make gpu-proofs` names all."""
    names: str = pytestconfig.getoption("--gpu-targets")
    return names.split(",")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory, targets: list[str]) -> list[dict[str, Any]]:
    """What `compile_kernels` prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.support.kernels.compile_kernels", *targets]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# One test: in two processes, both would compile.
def test_every_kernel_is_compiled_for_every_target_and_fits(kernels: list[dict[str, Any]], targets: list[str]) -> None:
    sources = (ROOT / "services" / "worker" / "ops" / "triton").rglob("*.py")
    names = {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source.read_text(), re.M)}
    assert "_decode_attention_kernel" in names
    for target in targets:
        assert {kernel["name"] for kernel in kernels if kernel["target"] == target} == names
    assert [kernel for kernel in kernels if kernel["shared_bytes"] > SHARED_BYTES[kernel["target"]]] == []
    # None keeps registers in memory.
    assert [kernel for kernel in kernels if kernel["num_spilled_bytes"]] == []
    # A step of odd sizes needs no other kernel.
    assert [kernel for kernel in kernels if kernel["is_late"]] == []
