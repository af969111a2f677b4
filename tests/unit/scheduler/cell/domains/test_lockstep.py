"""The plan of coupled ranks: what each rank runs in a step, and what each learns about the others."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.cell.domains.lockstep import common_graph_sizes, graph_batch_size
from services.scheduler.cell.events import DomainAttached
from services.scheduler.core.batch.step import Step, StepCounts
from services.scheduler.core.policy import CellTopology, SchedulerPolicy
from shared.request.limits import GRAPH_BATCH_SIZES
from shared.step.step import StepKind
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.engine_driver import EngineDriver, worker_facts

PREFILL, DECODE = StepKind.PREFILL, StepKind.DECODE


def coupled(dp_size: int = 3, depth: int = 1, **policy: object) -> EngineDriver:
    return EngineDriver(
        topology=CellTopology(dp_size=dp_size, is_coupled=True),
        depth=depth,
        policy=SchedulerPolicy(**{"max_prefill_wait_steps": 2, **policy}),  # type: ignore[arg-type]
    )


def make_prompt(length: int, start: int) -> list[int]:
    return [(start + 13 * index) % 1000 for index in range(length)]


def take_steps(driver: EngineDriver) -> list[Step]:
    """Run the oldest step on all ranks; returns it, by rank."""
    steps = [sent[0] for sent in driver.sent_to.values()]
    for rank in driver.sent_to:
        driver.step(rank)
    return steps


def shape(steps: list[Step]) -> list[tuple[StepKind, int]]:
    """The kind of each rank's step and the number of sequence tokens that it computes, 0 for a dummy."""
    return [(step.batch.kind, step.batch.num_tokens) for step in steps]


def test_an_idle_rank_runs_a_dummy_of_the_same_kind() -> None:
    driver = coupled()
    driver.submit(1, make_prompt(20, 1), max_tokens=3)
    assert shape(take_steps(driver)) == [(PREFILL, 20), (PREFILL, 0), (PREFILL, 0)]
    assert shape(take_steps(driver)) == [(DECODE, 1), (DECODE, 0), (DECODE, 0)]
    busy, *idle = [rank.num_steps for rank in driver.engine.state().ranks]
    assert (busy, idle) == (StepCounts(prefill=1, decode=2), 2 * [StepCounts(dummy=3)])


def test_a_rank_decodes_beside_another_ranks_prefill() -> None:
    driver = coupled(dp_size=2)
    driver.submit(1, make_prompt(20, 1))
    take_steps(driver)
    driver.submit(2, make_prompt(30, 2))
    take_steps(driver)
    steps = take_steps(driver)
    assert shape(steps) == [(DECODE, 1), (PREFILL, 30)]
    assert {(step.num_tokens_across_dp, step.graph_batch_size) for step in steps} == {((1, 30), 0)}


def test_all_ranks_get_the_same_plan() -> None:
    driver = coupled(max_num_seqs=64)
    for handle in range(1, 8):
        driver.submit(handle, make_prompt(10 + handle, handle))
    take_steps(driver)
    take_steps(driver)
    steps = take_steps(driver)
    assert {step.num_tokens_across_dp for step in steps} == {(3, 2, 2)}
    assert {step.graph_batch_size for step in steps} == {4}
    assert {step.step_id for step in steps} == {3}


def test_without_work_on_any_rank_no_step_is_sent() -> None:
    driver = coupled()
    assert not any(driver.sent_to.values())
    driver.submit(1, make_prompt(20, 1), max_tokens=1)
    take_steps(driver)
    assert not any(driver.sent_to.values())


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_is_sent_only_when_every_rank_has_room(depth: int) -> None:
    driver = coupled(depth=depth)
    driver.submit(1, make_prompt(20, 1), max_tokens=20)
    assert [len(sent) for sent in driver.sent_to.values()] == [depth] * 3
    driver.step(0)
    driver.step(2)
    assert [len(sent) for sent in driver.sent_to.values()] == [depth - 1, depth, depth - 1]
    driver.step(1)
    assert [len(sent) for sent in driver.sent_to.values()] == [depth] * 3


@pytest.mark.parametrize(
    ("num_rows", "size"), [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 48), (512, 512), (513, 0)]
)
def test_rows_are_padded_to_the_next_captured_size_or_run_eagerly(num_rows: int, size: int) -> None:
    assert graph_batch_size(num_rows, GRAPH_BATCH_SIZES) == size


@pytest.mark.parametrize(
    ("sizes", "common"),
    [
        ([(1, 2, 4)], [1, 2, 4]),
        ([(1, 2, 4, 8), (2, 8, 64), (64, 8, 2, 1)], [2, 8]),
        ([(1, 2), (4, 8)], []),
        ([(1, 2), ()], []),
    ],
)
def test_coupled_ranks_use_the_graphs_that_all_of_them_have(sizes: list[tuple[int, ...]], common: list[int]) -> None:
    assert common_graph_sizes([worker_facts(graph_batch_sizes=one) for one in sizes]) == common


@pytest.mark.parametrize(("others", "size"), [((3, 5), 3), ((1, 2), 0), ((), 0)])
def test_a_decode_is_eager_for_all_ranks_if_one_has_no_graph_for_it(others: tuple[int, ...], size: int) -> None:
    driver = coupled(max_num_seqs=64)
    facts = [worker_facts(epoch=2, graph_batch_sizes=sizes) for sizes in ((1, 2, 3, 4, 5), others, (3, 5, 7))]
    driver.lose()
    driver.on_event(DomainAttached(0, tuple(facts)))
    for handle in range(1, 8):
        driver.submit(handle, make_prompt(10 + handle, handle))
    steps = take_steps(driver)
    while any(step.batch.kind is PREFILL for step in steps):
        steps = take_steps(driver)
    assert max(steps[0].num_tokens_across_dp) == 3
    assert {step.graph_batch_size for step in steps} == {size}


def test_captured_sizes_are_those_of_atom() -> None:
    assert GRAPH_BATCH_SIZES[:6] == (1, 2, 4, 8, 16, 32)
    assert GRAPH_BATCH_SIZES[-1] == 512


def waiting_driver(max_wait_steps: int) -> EngineDriver:
    """Two ranks that decode, and one new request."""
    driver = coupled(dp_size=2, max_prefill_wait_steps=max_wait_steps)
    driver.submit(11, make_prompt(20, 1), max_tokens=60)
    driver.submit(12, make_prompt(20, 2), max_tokens=60)
    take_steps(driver)
    driver.submit(2, make_prompt(20, 3))
    return driver


@pytest.mark.parametrize("max_wait_steps", [0, 1, 4])
def test_a_prefill_waits_for_other_ranks_for_at_most_the_set_number_of_steps(max_wait_steps: int) -> None:
    driver = waiting_driver(max_wait_steps)
    kinds = [shape(take_steps(driver))[0][0] for _ in range(max_wait_steps + 2)]
    # The first step was already in flight when the request arrived.
    assert kinds == [DECODE] * (max_wait_steps + 1) + [PREFILL]


def test_a_prefill_stops_waiting_once_every_rank_has_one() -> None:
    driver = waiting_driver(50)
    take_steps(driver)
    assert shape(take_steps(driver)) == [(DECODE, 1), (DECODE, 1)]
    driver.submit(3, make_prompt(20, 4))
    take_steps(driver)
    assert shape(take_steps(driver)) == [(PREFILL, 20), (PREFILL, 20)]


def test_a_prefill_does_not_wait_for_ranks_that_would_only_run_dummies() -> None:
    driver = coupled(dp_size=2, max_prefill_wait_steps=50)
    driver.submit(1, make_prompt(20, 1), max_tokens=60)
    take_steps(driver)
    driver.submit(2, make_prompt(20, 2))
    take_steps(driver)
    assert shape(take_steps(driver)) == [(DECODE, 1), (PREFILL, 20)]


@given(seed=st.integers(0, 10_000))
@settings(max_examples=40)
def test_ranks_stay_in_step_under_any_load_and_no_request_starves(seed: int) -> None:
    rng = Random(seed)
    dp_size = rng.choice([2, 3, 5])
    driver = EngineDriver(
        topology=CellTopology(dp_size=dp_size, is_coupled=True),
        depth=rng.choice([1, 2, 3]),
        num_blocks=rng.choice([12, 40]),
        block_size=4,
        policy=SchedulerPolicy(
            max_num_seqs=rng.choice([1, 2, 8]),
            max_num_batched_tokens=rng.choice([16, 64]),
            enable_mixed_steps=rng.random() < 0.5,
            max_prefill_wait_steps=rng.choice([0, 2, 8]),
        ),
    )
    prompts = {handle: make_prompt(rng.randint(1, 30), handle) for handle in range(1, 16)}
    waiting = list(prompts)
    seen: dict[int, dict[tuple[int, ...], int]] = {}
    while waiting or any(driver.sent_to.values()):
        if waiting and (rng.random() < 0.3 or not any(driver.sent_to.values())):
            driver.submit(waiting[0], prompts[waiting.pop(0)], max_tokens=8)
        ranks = [rank for rank, sent in driver.sent_to.items() if sent]
        # The other ranks make progress meanwhile: a long step is not a hang.
        driver.progress = dict.fromkeys(driver.sent_to, int(driver.now))
        if ranks:
            rank = rng.choice(ranks)
            step = driver.sent_to[rank][0]
            counts = seen.setdefault(step.step_id, {})
            counts[step.num_tokens_across_dp] = counts.get(step.num_tokens_across_dp, 0) + 1
            assert step.num_tokens_across_dp[rank] == max(1, step.batch.num_tokens)
            driver.step(rank)
            assert driver.workers[rank].last_num_tokens == step.num_tokens_across_dp[rank]
    assert all(list(counts.values()) == [dp_size] for counts in seen.values()), "ranks got different plans"
    for handle, prompt in prompts.items():
        assert driver.choices[1, handle].tokens == expected_completion(prompt, 0, 8)
    assert driver.engine.state().num_used_blocks == 0
