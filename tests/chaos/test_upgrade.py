"""A cell of the first commit with capabilities is upgraded to this checkout, role by role, under load."""

from __future__ import annotations

import json
from importlib import metadata
from itertools import groupby
from pathlib import Path

import pytest

from shared.release import DISTRIBUTION
from tests.support.cells.chaos import Damage, TellOf, learn, mixed_requests
from tests.support.cells.loaded_cell import start_loaded_cell
from tests.support.system.wheels import HIGHER_RELEASE, first_commit, unpack_commit, unpack_higher_release

# The wheels are built first, which downloads the generator of the stubs.
pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(1800)]

NUM_STREAMS = 200


def releases_seen(log: Path) -> list[str]:
    """The releases of the schedulers that attached a worker, in order."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [release for release, _ in groupby(line["release"] for line in lines if line.get("message") == "attached")]


async def test_a_cell_is_upgraded_role_by_role_and_no_answer_changes(
    model_dir: Path, tmp_path: Path, tell_of: TellOf
) -> None:
    commit = first_commit()
    if not commit:
        pytest.skip("this is no clone of the project: no earlier release can be built")
    old, new = unpack_commit(commit, tmp_path / "old"), unpack_higher_release(tmp_path / "new")
    (old_distribution,) = metadata.distributions(name=DISTRIBUTION, path=[str(old)])
    peace = await learn(model_dir, mixed_requests(NUM_STREAMS))
    async with start_loaded_cell(model_dir, tmp_path, peace, drain_s=0.3, root=old) as loaded:
        await loaded.upgrade(new)

    tell_of(loaded.load, 6, loaded.states[-1])
    assert loaded.load.damage == Damage()
    assert loaded.load.num_answers >= NUM_STREAMS
    # The drain is short, so answers that workers of the old release began are continued by the new ones.
    assert loaded.num_resumes > 0
    for state in loaded.states:
        assert (state.num_lost_epochs, state.num_suspects, state.num_poison_requests) == (0, 0, 0)
    for rank in (0, 1):
        old_log, new_log = loaded.cell.logs(f"worker {rank}")
        assert releases_seen(old_log) == [old_distribution.version]
        assert releases_seen(new_log) == [old_distribution.version, HIGHER_RELEASE]
