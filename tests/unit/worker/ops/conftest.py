"""Shared by the tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels.interpreter import patch_language_once


@pytest.fixture(scope="session", autouse=True)
def _fast_interpreter() -> Iterator[None]:
    """See `patch_language_once`."""
    with pytest.MonkeyPatch.context() as patch:
        patch_language_once(patch)
        yield
