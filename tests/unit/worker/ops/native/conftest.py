"""The backend for every set of instructions that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from services.worker.ops.native.backend import NativeOps
from services.worker.ops.native.build import BuildError
from services.worker.ops.native.isa import Isa, available_isas


@pytest.fixture(scope="session", params=list(Isa), ids=lambda isa: isa.value)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    """The backend; skips the test where it does not run."""
    if request.param not in available_isas():
        pytest.skip("this machine lacks the instructions")
    try:
        return NativeOps(request.param)
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(params=[1, 2, 4])
def num_threads(ops: NativeOps, request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of threads that kernels run on."""
    former, former_of_torch = ops.num_threads, torch.get_num_threads()
    ops.use_threads(request.param)
    yield request.param
    ops.use_threads(former)
    torch.set_num_threads(former_of_torch)
