"""Workers and schedulers that are killed and stopped in rotation, beside tenants with weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from shared.tenants.tenant import Tenant
from tests.support.cells.chaos import HEALTH_KILL_S, Damage, GrpcAsker, Killer, Load, Peace, TellOf, chaos_cell
from tests.support.clients.key_files import key_line, write_keys
from tests.support.clients.tenant_replica import open_tenant_replica

pytestmark = pytest.mark.slow

# Each kind once.
MIN_KILLS = 3
# So few that requests wait, and rows are shared.
NUM_SLOTS = 16
NUM_RANKS = 2
HEAVY, LIGHT = Tenant("heavy", 3.0), Tenant("light", 1.0)


async def test_requests_outlive_whatever_dies_or_hangs(
    model_dir: Path, peace: Peace, num_kills: int, tell_of: TellOf, tmp_path: Path
) -> None:
    lines = [key_line(f"sk-{tenant.name}", tenant.name, weight=tenant.weight) for tenant in (HEAVY, LIGHT)]
    flags = (
        f"--dp={NUM_RANKS}",
        f"--health-kill-s={HEALTH_KILL_S}",
        f"--client-keys={write_keys(tmp_path / 'keys', *lines)}",
        f"--scheduler.max-num-seqs={NUM_SLOTS}",
    )
    async with chaos_cell(model_dir, *flags) as (cell, client):
        load = Load(client, peace, asker=GrpcAsker(client, [f"sk-{tenant.name}" for tenant in (HEAVY, LIGHT)]))
        killer = Killer(cell, load)
        async with load.keep_in_flight():
            for _ in range(max(num_kills, MIN_KILLS)):
                await killer.hit_anything()
                await load.settle()
        state = await client.wait_until_idle()
        num_tokens = await share_tokens(cell.cell_address)

    tell_of(load, killer.num_deaths, state)
    assert load.damage == Damage()
    assert load.num_answers >= len(peace.requests)
    assert killer.num_deaths == max(num_kills, MIN_KILLS)
    assert 0.95 * 3 < num_tokens[HEAVY.name] / num_tokens[LIGHT.name] < 1.05 * 3


async def share_tokens(cell_address: str) -> Counter[str]:
    """The tokens of both tenants, by name, while requests of both wait."""
    num_tokens, num_ended = Counter[str](), Counter[str]()
    num_requests = 4 * NUM_RANKS * NUM_SLOTS
    async with open_tenant_replica(cell_address) as replica:
        await replica.submit(LIGHT, HEAVY, num_requests=num_requests, max_tokens=30)
        # On every rank, should one compute twice as fast as the other.
        while num_ended[HEAVY.name] < num_requests // 2:
            outputs = await replica.read()
            num_tokens += outputs.num_tokens
            num_ended.update(outputs.ended)
    return num_tokens
