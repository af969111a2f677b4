"""Processes with AITER's wheel, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.aiter.process import aiter_environment
from tests.support.ranks.rank_pool import RankPool


@pytest.fixture(scope="module")
def aiter_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Ranks on the backend `aiter`, with stand-ins for the kernels that only an AMD GPU runs."""
    pool = RankPool("tests.support.aiter.rank", aiter_environment(tmp_path_factory.mktemp("aiter")))
    yield pool
    pool.close()
