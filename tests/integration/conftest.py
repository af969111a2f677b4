"""Cells shared by several integration tests, started once per session."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.model_files.model_dir import CHAT_TEMPLATE
from tests.support.cells.cell import FLOAT32, REFERENCE, Cell, start_cell
from tests.support.cells.narrow_cell import NarrowCell, start_narrow_cell
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


@pytest.fixture(scope="session")
def tiny_cell(tiny_model: Path) -> Iterator[Cell]:
    """A cell of the tiny model without any flag. Tests must leave it as they found it."""
    with start_cell(tiny_model) as cell:
        yield cell


@pytest.fixture(scope="session")
def reference_cell(tiny_model: Path) -> Iterator[Cell]:
    """A cell on `reference` without a prefix cache, so that an answer depends only on its request.

    Tests must leave it as they found it.
    """
    with start_cell(tiny_model, REFERENCE, "--scheduler.no-enable-prefix-caching") as cell:
        yield cell


@pytest.fixture(scope="session")
def narrow_cell(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NarrowCell]:
    """A cell that runs one request and lets one wait, on a pool of 384 tokens, less than the context of 512.

    Its chat template refuses messages with the word "forbidden". Tests must leave it as they found it.
    """
    model_dir = Path(shutil.copytree(tiny_model, tmp_path_factory.mktemp("narrow") / "model"))
    template = model_dir / CHAT_TEMPLATE
    guard = "{% if 'forbidden' in messages[-1]['content'] %}{{ raise_exception('not this') }}{% endif %}"
    template.write_text(guard + template.read_text(encoding="utf-8"), encoding="utf-8")
    with start_narrow_cell(model_dir) as cell:
        yield cell


@pytest.fixture(scope="session", autouse=True)
def _take_interrupts() -> Iterator[None]:
    """Restore SIGINT for the processes that tests start: background jobs of a shell ignore it, also in children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
