"""Shared by the chaos tests: the number of kills, the models, and the summary at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cells.chaos import Load, Peace, State, TellOf, learn, mixed_requests
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model
from tests.support.models.tiny_llama import write_tiny_llama

MOE_ARCHITECTURE = "Qwen3MoeForCausalLM"
_REPORTS = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def num_kills(request: pytest.FixtureRequest) -> int:
    """Kills per test: `--chaos-kills`."""
    count: int = request.config.getoption("--chaos-kills")
    return count


@pytest.fixture(scope="session")
def num_pairs(request: pytest.FixtureRequest) -> int:
    """Joint kills of services per test: `--chaos-pairs`."""
    count: int = request.config.getoption("--chaos-pairs")
    return count


@pytest.fixture(scope="session")
def num_requests(num_kills: int) -> int:
    """Requests in flight; fewer for short runs, since after many kills all of them are recomputed."""
    return 200 if num_kills > 5 else 100


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model of two layers, since the tests exercise what happens between steps."""
    return write_tiny_llama(tmp_path_factory.mktemp("chaos"), changes={"num_hidden_layers": 2})


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with experts, for expert parallelism over two ranks."""
    values = next(iter(SMALL_CONFIGS[MOE_ARCHITECTURE].values()))
    return write_small_model(build_model(MOE_ARCHITECTURE, values), tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="session")
def peace(model_dir: Path, num_requests: int) -> Peace:
    """Requests of every kind, with their answers in an undisturbed run."""
    return asyncio.run(learn(model_dir, mixed_requests(num_requests)))


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Returns a function that adds a line about the test to the terminal summary."""
    reports = request.config.stash.setdefault(_REPORTS, [])
    return lambda facts: reports.append(f"{request.node.name}: {facts}")


@pytest.fixture
def tell_of(report: Callable[[str], None]) -> TellOf:
    """Returns a function that adds the result of a load to the terminal summary."""

    def tell(load: Load, num_deaths: int, state: State) -> None:
        seen = f"{state.num_lost_epochs} lost epochs, {state.num_late_results} late results"
        report(f"{num_deaths} deaths; {seen}; {load.describe()}")

    return tell


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the result of each load."""
    for line in config.stash.get(_REPORTS, []):
        terminalreporter.write_line(line)
