"""How requests are placed on DP ranks."""

from __future__ import annotations

from itertools import count

import pytest

from services.scheduler.cell.domains.domain import Rank
from services.scheduler.cell.domains.placement import Placement
from services.scheduler.core.batch.sequence import Sequence
from services.scheduler.core.policy import CellTopology, SchedulerPolicy
from shared.ids import DpRank
from shared.request.sampling_params import SamplingOptions
from shared.tenants.tenant import Tenant
from tests.support.scheduler.core import make_scheduler, make_sequence
from tests.support.scheduler.engine_driver import EngineDriver

LONG = [(11 + 13 * index) % 1000 for index in range(320)]


def make_driver(dp_size: int = 2, *, attach: bool = True, **policy: object) -> EngineDriver:
    return EngineDriver(
        topology=CellTopology(dp_size=dp_size),
        policy=SchedulerPolicy(**policy),  # type: ignore[arg-type]
        attach=attach,
        num_blocks=256,
    )


def load(driver: EngineDriver) -> list[int]:
    """The number of sequences on each rank."""
    return [rank.num_waiting + rank.num_running for rank in driver.engine.state().ranks]


def distinct(handle: int, length: int = 20) -> list[int]:
    return [(7 * handle + 17 * index) % 1000 for index in range(length)]


def test_new_requests_go_to_the_least_loaded_rank() -> None:
    driver = make_driver(3)
    loads = []
    for handle in range(1, 8):
        driver.submit(handle, distinct(handle), max_tokens=50)
        loads.append(load(driver))
    assert loads[2] == [1, 1, 1]
    assert loads[5] == [2, 2, 2]
    assert sorted(loads[6]) == [2, 2, 3]


def test_a_long_waiting_prompt_counts_as_load() -> None:
    driver = make_driver(2, max_num_seqs=1, placement_tokens_per_seq=1)
    for handle in (1, 2):
        driver.submit(handle, distinct(handle), max_tokens=50)
    driver.submit(3, distinct(3, 400), max_tokens=5)
    for handle in (4, 5):
        driver.submit(handle, distinct(handle), max_tokens=5)
    assert load(driver) == [2, 3]


def warm_up(driver: EngineDriver, rank: int = 1) -> None:
    """Let one rank compute the long prompt."""
    for domain in range(driver.topology.dp_size):
        if domain != rank:
            driver.lose(domain)
    driver.submit(100, LONG, max_tokens=1)
    driver.run()
    for domain in range(driver.topology.dp_size):
        if domain != rank:
            driver.attach(domain)


def test_a_request_goes_to_the_rank_that_has_its_prefix_cached() -> None:
    driver = make_driver()
    warm_up(driver)
    driver.submit(1, [*LONG, 1], max_tokens=50)
    assert load(driver) == [0, 1]
    driver.run()
    assert driver.choices[1, 1].num_cached_tokens == 320


@pytest.mark.parametrize(("tokens_per_seq", "num_others"), [(50, 6), (200, 1), (1000, 0)])
def test_a_cached_prefix_counts_until_its_rank_is_overloaded(tokens_per_seq: int, num_others: int) -> None:
    driver = make_driver(placement_tokens_per_seq=tokens_per_seq)
    warm_up(driver)
    handle = 0
    while load(driver)[0] == 0:
        handle += 1
        driver.submit(handle, [*LONG, handle], max_tokens=50)
        while driver.engine.state().ranks[1].num_waiting:
            driver.step(1)
    # Requests share the rank until its load outweighs their cached tokens; then the other one computes the prompt.
    assert load(driver) == [1, num_others + 1]


def test_another_tenants_prefix_is_ignored() -> None:
    driver = make_driver()
    warm_up(driver)
    driver.submit(1, [*LONG, 1], max_tokens=50, cache_salt=b"other")
    assert load(driver) == [1, 0]


def test_a_scored_prompt_shares_nothing_and_goes_to_the_least_loaded_rank() -> None:
    driver = make_driver()
    warm_up(driver)
    driver.submit(1, [*LONG, 1], max_tokens=50, options=SamplingOptions(num_prompt_logprobs=0))
    assert load(driver) == [1, 0]


def test_choices_of_a_request_are_not_split() -> None:
    driver = make_driver(3)
    driver.submit(1, distinct(1), n=5, max_tokens=9)
    assert load(driver) == [5, 0, 0]


def test_only_attached_ranks_get_requests() -> None:
    driver = make_driver(3, attach=False)
    driver.attach(1)
    for handle in range(1, 5):
        driver.submit(handle, distinct(handle))
    assert load(driver) == [0, 4, 0]
    driver.attach(2)
    for handle in range(5, 8):
        driver.submit(handle, distinct(handle))
    assert load(driver) == [0, 4, 3]


def test_requests_that_wait_for_a_rank_keep_their_order() -> None:
    driver = make_driver(2, max_num_seqs=1)
    driver.lose(0)
    driver.lose(1)
    for handle in range(1, 5):
        driver.submit(handle, distinct(handle), max_tokens=2)
    driver.attach(1)
    driver.run()
    assert [handle for _, handle in driver.choices] == [1, 2, 3, 4]


_handles = count(1)


def seqs_of(name: str, num_seqs: int, num_tokens: int, *, weight: float = 1.0) -> list[Sequence]:
    seqs = [make_sequence(next(_handles), num_tokens) for _ in range(num_seqs)]
    for seq in seqs:
        seq.tenant = Tenant(name, weight)
    return seqs


@pytest.mark.parametrize(
    ("name", "weight", "rank"),
    [
        # Its own waiting request delays it, and the flood does not.
        ("quiet", 1.0, 0),
        # To the flood's tenant all of its requests count.
        ("loud", 1.0, 1),
        # One that goes after most of the others.
        ("third", 0.001, 1),
        ("third", 1.0, 0),
    ],
)
def test_what_other_tenants_have_waiting_counts_up_to_their_share(name: str, weight: float, rank: int) -> None:
    ranks = [Rank(DpRank(number), make_scheduler()) for number in range(2)]
    waiting = [seqs_of("loud", 100, 400), [*seqs_of("loud", 50, 400), *seqs_of("quiet", 1, 400)]]
    for one, seqs in zip(ranks, waiting, strict=True):
        for seq in seqs:
            one.scheduler.add(seq, 0.0)
    (seq,) = seqs_of(name, 1, 20, weight=weight)
    Placement(tokens_per_seq=256).place([seq], ranks, 0.0)
    assert seq.rank == rank
    for one in ranks:
        one.scheduler.check_integrity()
