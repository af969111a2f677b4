"""L2: AITER's own Triton kernels compute in the interpreter what the reference backend does, in float32."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest

from tests.support.aiter.interpreted import Case
from tests.support.aiter.process import aiter_environment
from tests.support.system.processes import LineProcesses

pytestmark = pytest.mark.process

# Measured: 1e-6 at most.
TOLERANCE = 2e-5

# Long enough for parts on a GPU with many compute units; the other lengths are shorter than one tile, or not whole.
LONG = Case(num_cached=(600, 3), num_new=(1, 1), num_compute_units=304)
CASES = {
    "a prefill": Case(num_cached=(0, 0, 0), num_new=(5, 1, 70)),
    "a prefix": Case(num_cached=(32, 16, 100), num_new=(20, 1, 3)),
    "decodes": Case(num_cached=(0, 15, 16, 90), num_new=(1, 1, 1, 1)),
    "drafts": Case(num_cached=(40, 63), num_new=(9, 2)),
    "blocks of 32": Case(num_cached=(33, 5), num_new=(1, 40), block_size=32),
    "a window": Case(num_cached=(40, 0), num_new=(1, 60), window=17),
    "decodes with a window": Case(num_cached=(40, 90), num_new=(1, 1), window=17),
    "sinks": Case(num_cached=(40, 0), num_new=(1, 60), has_sinks=True, window=17),
    "one head for many": Case(num_cached=(40, 0), num_new=(1, 30), num_heads=6, num_kv_heads=1),
    "wide heads": Case(num_cached=(20, 0), num_new=(1, 30), head_dim=24),
    "a long context in parts": LONG,
    "a long context in parts, with sinks": Case(**{**asdict(LONG), "has_sinks": True}),
    "a long context of wide heads": Case(**{**asdict(LONG), "head_dim": 24}),
    "experts": Case(num_experts=4, num_tokens=21),
    "many rows for each expert": Case(num_experts=2, num_tokens=75),
    "one token's experts": Case(num_experts=8, num_tokens=1),
    "experts with biases": Case(num_experts=4, num_tokens=9, has_clamp=True),
    "experts that are elsewhere": Case(num_experts=3, num_tokens=40, num_elsewhere=3, has_clamp=True),
    "all experts of a token are elsewhere": Case(num_experts=1, num_tokens=21, num_elsewhere=9),
    "packed experts": Case(num_experts=4, num_tokens=9, is_packed=True),
    "packed experts with biases": Case(num_experts=4, num_tokens=9, has_clamp=True, is_packed=True),
}
Ask = Callable[[Case], float]


@pytest.fixture(scope="module")
def difference_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    processes = LineProcesses("tests.support.aiter.interpreted", aiter_environment(tmp_path_factory.mktemp("aiter")))
    yield lambda case: float(processes.ask([json.dumps(asdict(case)) + "\n"])[0])
    processes.close()


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_computes_what_the_reference_does(difference_of: Ask, name: str) -> None:
    assert difference_of(CASES[name]) <= TOLERANCE
