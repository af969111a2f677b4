"""L2: AITER's Triton kernels compile for its GPUs as the backend launches them, and fit them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.aiter.process import aiter_environment
from tests.support.system.processes import ROOT

pytestmark = [pytest.mark.proof, pytest.mark.process, pytest.mark.timeout(1800)]

SHARED_BYTES = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}
# Bytes per thread that the compiler keeps in memory for AITER's own choice of tiles, by kernel and padded width of a
# head: in prefills of 256 tokens and more, and where few long contexts of wide heads are joined.
SPILLED_BYTES = {
    ("kernel_unified_attention_2d", 128): 128,
    ("kernel_unified_attention_2d", 256): 1024,
    ("reduce_segments", 256): 128,
}


@pytest.fixture(scope="module")
def kernels(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `aiter_compile` prints for those of the chosen targets that AITER has kernels for."""
    targets = [name for name in pytestconfig.getoption("--gpu-targets").split(",") if name in SHARED_BYTES]
    environment = {**os.environ, **aiter_environment(tmp_path_factory.mktemp("aiter"))}
    del environment["TRITON_INTERPRET"]
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.support.aiter.compile", *targets]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {kernel["target"] for kernel in lines} == set(targets)
    return lines


def test_every_kernel_is_compiled(kernels: list[dict[str, Any]]) -> None:
    names = {"kernel_unified_attention_2d", "kernel_unified_attention_3d", "reduce_segments", "_fused_moe_kernel"}
    for target in {kernel["target"] for kernel in kernels}:
        compiled = [kernel["name"] for kernel in kernels if kernel["target"] == target]
        assert all(any(each.startswith(name) for each in compiled) for name in names)


def test_no_kernel_needs_more_shared_memory_than_there_is(kernels: list[dict[str, Any]]) -> None:
    assert [kernel for kernel in kernels if kernel["shared_bytes"] > SHARED_BYTES[kernel["target"]]] == []


def test_no_kernel_spills_more_than_with_the_tiles_that_aiter_chooses(kernels: list[dict[str, Any]]) -> None:
    def allowed(kernel: dict[str, Any]) -> int:
        widths = {int(each) for each in kernel["constants"].split(", ") if each.isdecimal()}
        return max(
            (size for (name, width), size in SPILLED_BYTES.items() if name == kernel["name"] and width in widths),
            default=0,
        )

    assert [kernel for kernel in kernels if kernel["num_spilled_bytes"] > allowed(kernel)] == []
