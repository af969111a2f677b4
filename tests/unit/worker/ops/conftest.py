"""Shared by the tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels.interpreter import quicken


@pytest.fixture(scope="session", autouse=True)
def _fast_interpreter() -> Iterator[None]:
    """See `quicken`."""
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        yield
