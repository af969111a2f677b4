"""Tenants of a real cell get their shares, however many streams one of them has.

Everything is counted in steps, and in tokens in the order of the steps. For a client of the tokenizer that reads late,
the tokens of many steps arrive at once, and nothing of its tenant waits meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.tenant import Tenant
from tests.support.cells.cell import Cell, start_cell
from tests.support.clients.tenant_replica import open_tenant_replica

pytestmark = pytest.mark.slow

NUM_SLOTS = 8
LOUD, QUIET = Tenant("loud"), Tenant("quiet")


@pytest.fixture(scope="module")
def small_cell(tiny_model: Path) -> Iterator[Cell]:
    """A cell with few slots and a long queue."""
    flags = (f"--scheduler.max-num-seqs={NUM_SLOTS}", "--scheduler.max-waiting-requests=10000")
    with start_cell(tiny_model, *flags) as cell:
        yield cell


async def count_steps_to_first_token(cell: Cell, num_streams: int) -> int:
    """The most steps that one of a few quiet requests waits for its first token, beside so many loud streams."""
    counts: list[int] = []
    while len(counts) < 10:
        async with open_tenant_replica(cell.cell_address) as replica:
            # About as long as the tiny model's context allows.
            await replica.submit(LOUD, num_requests=num_streams, max_tokens=500)
            while (await replica.read()).num_tokens[LOUD.name] < min(num_streams, NUM_SLOTS):
                pass
            while len(counts) < 10 and (count := await replica.count_steps(QUIET, beside=LOUD)) is not None:
                counts.append(count)
    return max(counts)


async def test_tokens_are_shared_by_weight(small_cell: Cell) -> None:
    heavy, light = Tenant("heavy", 3.0), Tenant("light", 1.0)
    num_tokens, num_ended = Counter[str](), Counter[str]()
    async with open_tenant_replica(small_cell.cell_address) as replica:
        await replica.submit(light, heavy, num_requests=80, max_tokens=100)
        while num_ended[heavy.name] < 80 - NUM_SLOTS:
            outputs = await replica.read()
            num_tokens += outputs.num_tokens
            num_ended.update(outputs.ended)
    assert 0.95 * 3 < num_tokens[heavy.name] / num_tokens[light.name] < 1.05 * 3


async def test_a_quiet_tenant_waits_at_most_twice_as_long_beside_a_flood_as_beside_one_stream(small_cell: Cell) -> None:
    beside_one = await count_steps_to_first_token(small_cell, 1)
    assert await count_steps_to_first_token(small_cell, 5000) <= 2 * beside_one
