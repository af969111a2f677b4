"""`lockstep ranks`: the ranks of a failure domain on one node or on several end and start again together, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cells.cell import REFERENCE, Cell, start_cell
from tests.support.cells.rank_nodes import (
    RankNode,
    damage_under_load,
    refusal_of,
    restart_all,
    restart_launcher,
    run_node,
    run_nodes,
)
from tests.support.clients.client import connect
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model
from tests.support.system.scraping import scrape, values

RANK_FLAGS = (REFERENCE, "--worker.num-threads=1", "--worker.kv-cache-num-blocks=256")
MOE_ARCHITECTURE = "Qwen3MoeForCausalLM"


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with experts."""
    values = next(iter(SMALL_CONFIGS[MOE_ARCHITECTURE].values()))
    return write_small_model(build_model(MOE_ARCHITECTURE, values), tmp_path_factory.mktemp("moe"))


async def test_a_nodes_ranks_start_again_together_and_in_place(tiny_model: Path, tmp_path: Path) -> None:
    with run_node(tiny_model, tmp_path, "--tp=2", *RANK_FLAGS) as node:
        node.start()
        await node.wait_until_ready()
        before = {rank.pid for rank in node.find_ranks()}
        [old] = node.start_ids()
        node.kill_rank(1)
        await node.wait_until_ready(after=old)
        after = {rank.pid for rank in node.find_ranks()}
        restarts = values(await scrape(node.manage_address))
        exit_code = node.stop()

    assert len(before) == len(after) == 2
    assert not before & after
    assert {restarts[f"lockstep_rank_restarts_total 0.{rank}"] for rank in range(2)} == {1}
    assert len(set(node.start_ids())) == 2
    assert exit_code == 0
    assert "Traceback" not in node.log()


@pytest.mark.slow
def test_starts_that_fail_end_the_launcher_with_the_ranks_exit_code(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--tp=2", "--max-failed-starts=2", "--worker.meet-timeout-s=0.1", *RANK_FLAGS)
    with run_nodes(tiny_model, tmp_path, 2, *flags) as (_, node):
        node.start()
        exit_code = node.wait()
        log = node.log()

    assert exit_code == 1
    assert log.count("cannot meet the leader") >= 2
    assert log.count("started role=worker") == 2


@pytest.fixture(scope="module")
def nodes(moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RankNode]]:
    """Two nodes of a coupled cell; tests leave them running."""
    with run_nodes(moe_model, tmp_path_factory.mktemp("nodes"), 2, "--dp=2", "--ep", *RANK_FLAGS) as nodes:
        for node in nodes:
            node.start()
        yield nodes


@pytest.fixture(scope="module")
def cell(moe_model: Path, nodes: list[RankNode]) -> Iterator[Cell]:
    """The cell whose ranks are on the nodes."""
    workers = ",".join(node.address for node in nodes)
    with start_cell(moe_model, f"--workers={workers}", "--ep") as cell:
        yield cell


@pytest.mark.parametrize("number", [0, 1], ids=["first node", "second node"])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(RankNode.kill_rank, marks=pytest.mark.proof),
        pytest.param(restart_launcher, marks=pytest.mark.proof),
        pytest.param(restart_all, marks=pytest.mark.slow),
    ],
)
async def test_a_damaged_domain_of_two_nodes_is_back_under_a_new_start(
    cell: Cell, nodes: list[RankNode], damage: Callable[[RankNode], None], number: int
) -> None:
    async with connect(cell) as client:
        old = await damage_under_load(client, nodes, lambda: damage(nodes[number]))
    for node in nodes:
        await node.wait_until_ready()
    assert await refusal_of(nodes[0].address, old) == "GROUP_MISMATCH"
