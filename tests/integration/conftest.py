"""Cells shared by several integration tests, started once per session."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cells.cell import FLOAT32, Cell, start_cell
from tests.support.models.tiny_llama import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a small random model of two layers, since the tests exercise what happens around its steps."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"), changes={"num_hidden_layers": 2})


@pytest.fixture(scope="session")
def real_cell(float32_model: Path) -> Iterator[Cell]:
    """A cell that serves the real model in float32, as answers of quantised weights depend on the processor's kernels.

    Tests must leave it as they found it.
    """
    with start_cell(float32_model, *FLOAT32) as cell:
        yield cell


@pytest.fixture(scope="session", autouse=True)
def _take_interrupts() -> Iterator[None]:
    """Restore SIGINT for the processes that tests start: background jobs of a shell ignore it, also in children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
