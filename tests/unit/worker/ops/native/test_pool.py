"""The threads that kernels run on: kernels/pool.cpp."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from services.worker.ops.native import build
from services.worker.ops.native.backend import NativeOps
from services.worker.ops.native.isa import available_isas

_KERNELS = Path(build.__file__).parent / "kernels"


def states_of_pool_threads() -> list[str]:
    """The letter that Linux has for the state of each."""
    stats = [path.read_text(encoding="utf-8") for path in Path("/proc/self/task").glob("*/stat")]
    return [stat.rpartition(")")[2].split()[0] for stat in stats if "(kernels-" in stat]


def test_idle_threads_sleep(ops: NativeOps, num_threads: int) -> None:
    ops.prepare_linear(torch.ones(512, 512), None, torch.float32)(torch.ones(8, 512))
    # A thread that has just started has no name yet.
    while len(states := states_of_pool_threads()) < num_threads - 1 or set(states) - {"S"}:
        time.sleep(0.001)


def test_threads_of_the_process_may_use_the_pool_at_once(ops: NativeOps, num_threads: int) -> None:
    kernel = ops.prepare_linear(torch.arange(512.0 * 256).view(512, 256) / 1e4, None, torch.float32)
    inputs = [torch.full((8, 256), float(value)) for value in range(4)]
    expected = [kernel(x) for x in inputs]
    with ThreadPoolExecutor(len(inputs)) as callers:
        for _ in range(20):
            assert all(map(torch.equal, callers.map(kernel, inputs), expected))


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(not available_isas(), reason="no kernels for this processor")
def test_the_thread_sanitizer_finds_no_race(tmp_path: Path) -> None:
    program = tmp_path / "pool_check"
    sources = [Path(__file__).with_name("pool_check.cpp"), _KERNELS / "pool.cpp"]
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{_KERNELS}"]
    subprocess.run(["g++", *flags, *map(str, sources), "-o", str(program)], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr[-4000:]
