"""A service with its HTTP API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.tokenizer.http_client import HttpService, run_http_service


@pytest.fixture
async def http(tmp_path: Path, model_dir: Path) -> AsyncIterator[HttpService]:
    """A running service that is linked to its cell."""
    async with run_http_service(model_dir, tmp_path) as running:
        yield running
