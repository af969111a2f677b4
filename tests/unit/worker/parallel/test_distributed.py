"""Ranks that connect and exchange tensors over Gloo."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial

import psutil
import pytest
import torch
from torch import Tensor

from services.worker.layout import RankLayout
from services.worker.parallel import distributed
from services.worker.parallel.communicator import SINGLE, Communicator, Parallel, sum_in_order
from services.worker.parallel.distributed import GroupCommunicator, make_parallel
from services.worker.parallel.rendezvous import PartnerLostError, Rendezvous, open_rendezvous
from tests.support.ranks.thread_ranks import run_ranks

# The shape of a sum that Gloo computes with its ring algorithm.
LARGE = (100, 1000)


def tp_layouts(size: int) -> list[RankLayout]:
    """The ranks of one TP group."""
    return [RankLayout(tp_rank=rank, tp_size=size) for rank in range(size)]


def parts(size: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(size)]


def sum_own(given: list[Tensor], parallel: Parallel) -> Tensor:
    return parallel.tp.all_reduce(given[parallel.tp.rank].clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_an_exact_sum_is_computed_in_rank_order_at_any_size(size: int, dtype: torch.dtype) -> None:
    for shape in ((1, 7), LARGE):
        given = parts(size, shape, dtype)
        sums = run_ranks(tp_layouts(size), partial(sum_own, given))
        assert all(torch.equal(total, sum_in_order(given)) for total in sums)


def test_a_row_of_an_exact_sum_does_not_depend_on_the_others() -> None:
    given = parts(3, LARGE)

    def sum_some(parallel: Parallel) -> tuple[Tensor, Tensor]:
        x = given[parallel.tp.rank]
        return parallel.tp.all_reduce(x.clone())[10:13], parallel.tp.all_reduce(x[10:13].clone())

    for of_all, alone in run_ranks(tp_layouts(3), sum_some):
        assert torch.equal(of_all, alone)


@pytest.mark.parametrize("shape", [(1, 7), LARGE])
def test_a_fast_sum_has_the_same_bits_on_all_ranks(shape: tuple[int, ...]) -> None:
    given = parts(3, shape)
    sums = run_ranks(tp_layouts(3), partial(sum_own, given), is_exact=False)
    assert all(torch.equal(total, sums[0]) for total in sums)
    torch.testing.assert_close(sums[0], sum_in_order(given))


def test_columns_are_gathered_in_rank_order_however_many_each_rank_has() -> None:
    sizes = (3, 0, 2)

    def gather(parallel: Parallel) -> Tensor:
        rank = parallel.tp.rank
        return parallel.tp.all_gather(torch.full((4, sizes[rank]), float(rank)), sizes)

    for gathered in run_ranks(tp_layouts(3), gather):
        assert torch.equal(gathered, torch.tensor([0.0, 0, 0, 2, 2]).expand(4, 5))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
def test_rows_are_exchanged_however_many_each_pair_of_ranks_has(dtype: torch.dtype) -> None:
    counts = [[0, 2, 1], [3, 0, 0], [1, 1, 0]]  # From the first to the second.

    def exchange(parallel: Parallel) -> list[float]:
        rank = parallel.tp.rank
        rows = torch.cat([torch.full((count, 2), 10 * rank + to) for to, count in enumerate(counts[rank])]).to(dtype)
        received = parallel.tp.all_to_all(rows, counts[rank], [row[rank] for row in counts])
        assert torch.equal(received[:, 0], received[:, 1])
        return received[:, 0].tolist()

    assert run_ranks(tp_layouts(3), exchange) == [[10, 10, 10, 20], [1, 1, 21], [2]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bfloat16])
def test_rows_are_gathered_in_rank_order(dtype: torch.dtype) -> None:
    given = parts(3, (2, 5), dtype)
    gathered = run_ranks(tp_layouts(3), lambda parallel: parallel.tp.gather_rows(given[parallel.tp.rank]))
    assert all(torch.equal(rows, torch.cat(given)) for rows in gathered)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 200])
def test_each_rank_gets_its_rows_of_an_exact_sum(num_rows: int, dtype: torch.dtype) -> None:
    given = parts(3, (3 * num_rows, 2, 7), dtype)
    sums = run_ranks(tp_layouts(3), lambda parallel: parallel.tp.reduce_scatter_rows(given[parallel.tp.rank]))
    assert torch.equal(torch.cat(sums), sum_in_order(given))


@pytest.mark.parametrize("num_rows", [1, 200])
def test_each_rank_gets_its_rows_of_a_fast_sum(num_rows: int) -> None:
    given = parts(3, (3 * num_rows, 1000))

    def scatter(parallel: Parallel) -> Tensor:
        return parallel.tp.reduce_scatter_rows(given[parallel.tp.rank].clone())

    sums = run_ranks(tp_layouts(3), scatter, is_exact=False)
    torch.testing.assert_close(torch.cat(sums), sum_in_order(given))


def test_a_nan_stays_in_its_row_of_a_sum() -> None:
    given = parts(2, (40, 1000))
    given[1][3] = torch.nan
    for is_exact in (True, False):
        sums = run_ranks(
            tp_layouts(2),
            lambda parallel: parallel.tp.reduce_scatter_rows(given[parallel.tp.rank].clone()),
            is_exact=is_exact,
        )
        assert torch.cat(sums).isnan().any(dim=1).nonzero().tolist() == [[3]]


def test_coupled_ranks_have_their_own_group_and_a_group_of_all() -> None:
    layouts = [RankLayout(dp, 2, tp, 2, has_expert_parallel=True) for dp in range(2) for tp in range(2)]

    def gather(parallel: Parallel) -> list[list[float]]:
        own = torch.tensor([[float(parallel.layout.ep_rank)]])
        assert parallel.ep is not None
        return [parallel.tp.all_gather(own, (1, 1)).tolist()[0], parallel.ep.all_gather(own, (1,) * 4).tolist()[0]]

    everyone = [0, 1, 2, 3]
    assert run_ranks(layouts, gather) == [[[0, 1], everyone]] * 2 + [[[2, 3], everyone]] * 2


def test_experts_of_a_single_group_are_spread_over_it() -> None:
    layouts = [RankLayout(tp_rank=rank, tp_size=2, has_expert_parallel=True) for rank in range(2)]
    assert all(run_ranks(layouts, lambda parallel: parallel.ep is parallel.tp))


def test_a_single_rank_connects_to_no_other() -> None:
    x = torch.ones(2, 3)
    for layout in (RankLayout(), RankLayout(dp_rank=1, dp_size=2), RankLayout(has_expert_parallel=True)):
        parallel = make_parallel(layout, is_exact=True)
        assert (parallel.tp, parallel.ep, parallel.layout) == (SINGLE.tp, None, layout)
    assert torch.equal(SINGLE.tp.all_reduce(x), x)
    assert torch.equal(SINGLE.tp.all_gather(x, (3,)), x)
    assert torch.equal(SINGLE.tp.all_to_all(x, [2], [2]), x)
    assert torch.equal(SINGLE.tp.gather_rows(x), x)
    assert torch.equal(SINGLE.tp.reduce_scatter_rows(x), x)


def test_ranks_have_spoken_once_when_they_are_connected() -> None:
    """Else a graph would capture the collective with which NCCL connects."""
    layouts = [RankLayout(dp, 2, tp, 2, has_expert_parallel=True) for dp in range(2) for tp in range(2)]
    spoken: list[tuple[int, int]] = []

    class Listening(GroupCommunicator):
        def all_reduce(self, x: Tensor) -> Tensor:
            spoken.append((self.rank, self.size))
            return super().all_reduce(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "GroupCommunicator", Listening)
        run_ranks(layouts, lambda _: None)
    assert sorted(spoken) == [(0, 2), (0, 2), (0, 4), (1, 2), (1, 2), (1, 4), (2, 4), (3, 4)]


def test_ranks_of_another_start_are_not_connected() -> None:
    first = replace(open_rendezvous("127.0.0.1"), timeout=timedelta(seconds=2))

    def meet(layout: RankLayout, rendezvous: Rendezvous) -> Parallel:
        return make_parallel(layout, rendezvous, is_exact=True)

    layouts = tp_layouts(2)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(meet, layouts[0], first)
        late = pool.submit(meet, layouts[1], replace(first, start_id="second"))
        for future in (waiting, late):
            with pytest.raises(PartnerLostError):
                future.result()


def test_a_lost_partner_ends_a_collective() -> None:
    x = torch.ones(1, 4)

    def leave_or_wait(parallel: Parallel) -> str:
        communicator: Communicator = parallel.tp
        communicator.all_reduce(x.clone())
        if communicator.rank == 1:
            # Its connections are closed with the last reference.
            return "left"
        del parallel
        with pytest.raises(PartnerLostError):
            communicator.all_reduce(x.clone())
        # Nor does any later collective hang, or fail as a bug would.
        collectives: list[Callable[[], Tensor]] = [
            lambda: communicator.gather_rows(x),
            lambda: communicator.all_gather(x, (4, 4, 4)),
            lambda: communicator.all_to_all(x.repeat(3, 1), [1, 1, 1], [1, 1, 1]),
            lambda: communicator.reduce_scatter_rows(x.repeat(3, 1)),
            lambda: communicator.all_reduce(torch.ones(LARGE)),
        ]
        for collective in collectives:
            with pytest.raises(PartnerLostError):
                collective()
        return "noticed"

    assert run_ranks(tp_layouts(3), leave_or_wait) == ["noticed", "left", "noticed"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_ranks_listen_only_on_the_address_where_they_meet(host: str) -> None:
    def listening(parallel: Parallel) -> set[str]:
        connections = psutil.Process().net_connections()
        return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}

    addresses = set().union(*run_ranks(tp_layouts(2), listening, host=host))
    assert addresses <= {"127.0.0.1", "::1"}
    assert addresses
