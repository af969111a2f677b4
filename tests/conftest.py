"""What all tests share: the event loop, the patience of property tests, the real model, and how much chaos there is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from tests.support.processes import ROOT

# As many test processes as cores compute side by side. One whose threads wait for each other with a core taken from
# them, and spin as they do, takes many times as long. It must be said before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes is the machine's affair.
settings.register_profile("lockstep", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lockstep")

REAL_MODEL = ROOT / "models" / "smollm2-135m-instruct"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Here and not in tests/chaos, where pytest would look for it only when it is named."""
    parser.addoption("--chaos-kills", type=int, default=3, help="how often each test of tests/chaos kills")
    parser.addoption("--chaos-pairs", type=int, default=3, help="how often services die together in tests/chaos")


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Async tests run on the loop that the services run on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The directory of the real model. Tests that need it fail without it, they are never skipped."""
    assert (REAL_MODEL / "manifest.json").exists(), "the model is missing: `make test` imports it"
    return REAL_MODEL
