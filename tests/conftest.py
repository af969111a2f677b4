"""Shared by all tests: the event loop, Hypothesis settings, the real model, and the options of the chaos tests."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from services.worker.device import has_gpu_node
from tests.support.system import package_tools
from tests.support.system.processes import ROOT

# There are as many parallel test processes as cores. Threads that spin while waiting for each other become many times
# slower when another process takes their core. Must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a GPU, Triton's kernels run in its interpreter, on CPU tensors. Set before transformers imports Triton.
if not has_gpu_node():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The duration of an example depends on the machine's load, so it has no deadline. A change is checked on the same
# examples each time, or it would answer for a case that another change brought; the proofs search with new ones.
settings.register_profile(
    "lockstep", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile("lockstep-search", settings.get_profile("lockstep"), derandomize=False)
settings.load_profile("lockstep")

REAL_MODEL = ROOT / "models" / "smollm2-135m-instruct"
FLOAT32_MODEL = ROOT / "models" / "smollm2-135m-instruct-float32"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Defined here because pytest reads a folder's options only when that folder is on the command line."""
    parser.addoption("--chaos-kills", type=int, default=2, help="kills per test in tests/chaos")
    parser.addoption("--chaos-pairs", type=int, default=2, help="joint kills of services per test in tests/chaos")
    parser.addoption(
        "--gpu-targets", default="gfx942", help="what Triton kernels are compiled for: gfx942,gfx950,sm_90"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt tests and imported modules from garbage collection, which would visit millions of objects in vain."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tools are given to tests by their marks."""
    package_tools.note_test(item)


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run async tests on uvloop, as the services do."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The directory of the real model. Without it, tests that need it fail; they are never skipped."""
    return _imported(REAL_MODEL)


@pytest.fixture(scope="session")
def float32_model() -> Path:
    """The same model with all weights in float32, which transformers reads."""
    return _imported(FLOAT32_MODEL)


def _imported(model_dir: Path) -> Path:
    assert (model_dir / "manifest.json").exists(), "the model is missing: `make test` imports it"
    return model_dir
