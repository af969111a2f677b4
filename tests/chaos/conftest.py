"""What the chaos tests share: how much of it there is, what is served, and what they tell at the end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.chaos import Load, Peace, State, TellOf, learn, mixed_requests
from tests.support.small_configs import SMALL_CONFIGS
from tests.support.small_models import build_model, write_small_model
from tests.support.tiny_llama import write_tiny_llama

MOE_ARCHITECTURE = "Qwen3MoeForCausalLM"
_REPORTS = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def num_kills(request: pytest.FixtureRequest) -> int:
    """How often a test kills: `--chaos-kills`."""
    count: int = request.config.getoption("--chaos-kills")
    return count


@pytest.fixture(scope="session")
def num_pairs(request: pytest.FixtureRequest) -> int:
    """How often services die together: `--chaos-pairs`."""
    count: int = request.config.getoption("--chaos-pairs")
    return count


@pytest.fixture(scope="session")
def num_requests(num_kills: int) -> int:
    """How many are in flight; fewer where there are few kills: after many of them all are computed anew."""
    return 200 if num_kills > 5 else 100


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model of two layers: what is tested happens between the steps."""
    return write_tiny_llama(tmp_path_factory.mktemp("chaos"), changes={"num_hidden_layers": 2})


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model whose experts two ranks share."""
    values = next(iter(SMALL_CONFIGS[MOE_ARCHITECTURE].values()))
    return write_small_model(build_model(MOE_ARCHITECTURE, values), tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="session")
def peace(model_dir: Path, num_requests: int) -> Peace:
    """Requests of every kind, and what they get when nothing dies."""
    return asyncio.run(learn(model_dir, mixed_requests(num_requests)))


@pytest.fixture
def tell_of(request: pytest.FixtureRequest) -> TellOf:
    """Has what became of a load, and how many deaths it lived through, told behind the results."""
    reports = request.config.stash.setdefault(_REPORTS, [])

    def tell(load: Load, num_deaths: int, state: State) -> None:
        seen = f"{state.num_lost_epochs} lost epochs, {state.num_late_results} late results"
        reports.append(f"{request.node.name}: {num_deaths} deaths; {seen}; {load.describe()}")

    return tell


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell what became of each load."""
    for line in config.stash.get(_REPORTS, []):
        terminalreporter.write_line(line)
