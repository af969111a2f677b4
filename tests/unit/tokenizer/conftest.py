"""A tiny model, and the tokenizer service linked to a fake scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.models.tiny_tokenizer import TOOLS_CHATML, tiny_tokenizer, write_tiny_tokenizer
from tests.support.tokenizer.tokenizer_service import Service, run_tokenizer_service


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tiny tokenizer, named "tiny"."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    write_tiny_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tools_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with a chat template that takes tools."""
    directory = tmp_path_factory.mktemp("models") / "tiny-tools"
    directory.mkdir()
    write_tiny_tokenizer(directory, chat_template=TOOLS_CHATML)
    return directory


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The tiny tokenizer."""
    return tiny_tokenizer()


@pytest.fixture
async def service(tmp_path: Path, model_dir: Path) -> AsyncIterator[Service]:
    """A running service that is linked to its cell."""
    async with run_tokenizer_service(model_dir, tmp_path) as running:
        await running.link()
        yield running
