"""Every process of a cell is asked to end and replaced, one after the other, under load: a rolling upgrade."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.cells.chaos import Damage, Peace, TellOf
from tests.support.cells.loaded_cell import start_loaded_cell

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "drain_s",
    [pytest.param(30.0, id="answers finish", marks=pytest.mark.proof), pytest.param(0.3, id="answers move")],
)
async def test_a_rolling_upgrade_of_every_process_is_not_noticed(
    model_dir: Path,
    peace: Peace,
    tmp_path_factory: pytest.TempPathFactory,
    drain_s: float,
    tell_of: TellOf,
    num_kills: int,
) -> None:
    is_short = num_kills <= 5
    if drain_s > 1 and is_short:
        pytest.skip("takes a minute, and needs no other code than the other case: `make chaos` runs it")
    # Cells share nothing, so a short run has one.
    num_cells = 1 if is_short else 2
    directories = [tmp_path_factory.mktemp("cell") for _ in range(num_cells)]
    async with AsyncExitStack() as stack:
        cells = []
        for number in range(num_cells):
            part = Peace(peace.requests[number::num_cells], peace.answers[number::num_cells])
            starting = start_loaded_cell(model_dir, directories[number], part, drain_s=drain_s)
            cells.append(await stack.enter_async_context(starting))
        for loaded in cells:
            await loaded.replace_all()

    for loaded in cells:
        tell_of(loaded.load, 6, loaded.states[-1])
        assert loaded.load.damage == Damage()
        assert loaded.load.num_answers >= len(peace.requests) // num_cells
        # Only a short drain interrupts answers.
        assert (loaded.num_resumes > 0) is (drain_s < 1)
        for state in loaded.states:
            assert (state.num_lost_epochs, state.num_suspects, state.num_poison_requests) == (0, 0, 0)
