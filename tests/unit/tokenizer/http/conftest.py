"""A service with its HTTP API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.models.tiny_tokenizer import write_tiny_tokenizer
from tests.support.tokenizer.http_client import HttpService, run_http_service

# Shows all of a message in few tokens, as the context is small.
BRIEF = """\
{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}\
{% for message in messages %}{{ '<|im_start|>' ~ message.role ~ (message.name or '') }}\
{{ '(' ~ message.reasoning_content ~ ')' if message.reasoning_content }}{{ message.content }}\
{% for call in message.tool_calls or [] %}{{ '[' ~ call.function.name ~ call.function.arguments ~ ']' }}{% endfor %}\
{{ '<|im_end|>' }}{% endfor %}"""


@pytest.fixture(scope="session")
def brief_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the template `BRIEF`."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    write_tiny_tokenizer(directory, chat_template=BRIEF)
    return directory


@pytest.fixture
async def http(tmp_path: Path, model_dir: Path) -> AsyncIterator[HttpService]:
    """A running service that is linked to its cell."""
    async with run_http_service(model_dir, tmp_path) as running:
        yield running
