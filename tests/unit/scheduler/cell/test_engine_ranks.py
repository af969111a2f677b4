"""Cells with several ranks: what clients receive, whichever ranks compute it and whichever are lost."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.cell.events import DropDomain, TimePassed
from services.scheduler.core.policy import CellTopology, SchedulerPolicy
from tests.support.scheduler.cell_model import PoisonedError, expected_completion
from tests.support.scheduler.engine_driver import EngineDriver

UNCOUPLED = CellTopology(dp_size=3)
COUPLED = CellTopology(dp_size=3, is_coupled=True)
TOPOLOGIES = [UNCOUPLED, COUPLED]
RESTART_S = 2.0


def make_prompt(length: int, start: int = 11) -> list[int]:
    return [(start + 13 * index) % 1000 for index in range(length)]


def submit_many(driver: EngineDriver, count: int, *, max_tokens: int = 12, first: int = 1) -> None:
    """Submit requests that share no prefix; their handle is their seed."""
    for handle in range(first, first + count):
        driver.submit(handle, make_prompt(5 + handle % 40, start=7 * handle), max_tokens=max_tokens, seed=handle)


def check_answer(driver: EngineDriver, handle: int, max_tokens: int = 12) -> None:
    """Check that a request received its whole answer."""
    output = driver.choices[1, handle]
    assert output.tokens == expected_completion(make_prompt(5 + handle % 40, start=7 * handle), handle, max_tokens)
    assert output.end is not None
    assert output.end.error is None


def running_on(driver: EngineDriver) -> list[int]:
    return [rank.num_running for rank in driver.engine.state().ranks]


def step_all(driver: EngineDriver) -> None:
    """Run one step of each rank that has one."""
    for rank in [rank for rank, sent in driver.sent_to.items() if sent]:
        driver.step(rank)


def run_to_the_end(driver: EngineDriver) -> int:
    """Run everything; domains that die return after a while. Returns the number of deaths."""
    num_deaths = 0
    while any(driver.sent_to.values()) or driver.engine.state().num_waiting:
        for rank in driver.topology.ranks:
            domain = driver.topology.domain_of(rank)
            if domain not in driver.epochs:
                driver.now += RESTART_S
                driver.attach(domain)
            if driver.sent_to[rank]:
                try:
                    driver.step(rank)
                except PoisonedError:
                    num_deaths += 1
                    driver.lose(domain)
        driver.now += 0.1
        driver.on_event(TimePassed())
    return num_deaths


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_request_gets_its_tokens_on_any_rank(topology: CellTopology, depth: int) -> None:
    driver = EngineDriver(topology=topology, depth=depth)
    submit_many(driver, 7)
    assert all(driver.sent_to.values())
    driver.run()
    for handle in range(1, 8):
        check_answer(driver, handle)
    assert driver.engine.state().num_used_blocks == 0


def test_uncoupled_ranks_step_independently() -> None:
    driver = EngineDriver(topology=UNCOUPLED)
    submit_many(driver, 2)
    for _ in range(5):
        driver.step(0)
    assert [len(sent) for sent in driver.sent_to.values()] == [1, 1, 0]
    assert len(driver.choices[1, 1].tokens) == 5
    assert (1, 2) not in driver.choices


def test_the_choices_of_a_request_share_a_rank() -> None:
    driver = EngineDriver(topology=UNCOUPLED)
    driver.submit(1, make_prompt(40), n=4, max_tokens=6)
    driver.submit(11, make_prompt(40, 5), n=4, max_tokens=6)
    step_all(driver)
    assert running_on(driver) == [4, 4, 0]
    driver.run()
    for choice in range(4):
        assert driver.choices[1, 1 + choice].tokens == expected_completion(make_prompt(40), 0, 6, choice)


def test_the_sequences_of_a_lost_rank_move_to_the_others() -> None:
    driver = EngineDriver(topology=UNCOUPLED, depth=2, policy=SchedulerPolicy(max_num_seqs=2))
    submit_many(driver, 9)
    step_all(driver)
    state = driver.engine.state()
    assert [rank.num_waiting for rank in state.ranks] == [1, 1, 1]
    driver.lose(0)
    state = driver.engine.state()
    # Sequences in a step that did not return are suspects; those that were only waiting there continue.
    assert (state.num_suspects, sum(rank.num_waiting for rank in state.ranks)) == (2, 3)
    assert not state.ranks[0].is_attached
    # The rank never returns: another one retries the suspects when it is idle, or when they have waited for long.
    driver.run()
    for handle in range(1, 10):
        check_answer(driver, handle)
    state = driver.engine.state()
    assert (state.num_suspects, state.counters.num_suspect_trials) == (0, 2)


def test_requests_wait_while_no_rank_is_attached_and_continue_with_the_first_that_is() -> None:
    driver = EngineDriver(topology=UNCOUPLED)
    for domain in range(3):
        driver.lose(domain)
    submit_many(driver, 4)
    assert driver.engine.state().num_waiting == 4
    assert not driver.engine.is_ready
    driver.attach(2)
    assert len(driver.sent_to[2]) == 1
    driver.run()
    for handle in range(1, 5):
        check_answer(driver, handle)


def test_a_coupled_domain_is_lost_and_returns_as_a_whole() -> None:
    driver = EngineDriver(topology=COUPLED, depth=2)
    submit_many(driver, 6)
    step_all(driver)
    step_all(driver)
    driver.lose()
    assert [rank.is_attached for rank in driver.engine.state().ranks] == [False] * 3
    driver.attach()
    driver.run()
    for handle in range(1, 7):
        check_answer(driver, handle)


def test_queue_bounds_apply_to_the_whole_cell() -> None:
    policy = SchedulerPolicy(max_num_seqs=1, max_waiting_requests=2)
    driver = EngineDriver(topology=UNCOUPLED, policy=policy)
    submit_many(driver, 6)
    error = driver.choices[1, 6].end
    assert error is not None
    assert error.error is not None
    assert error.error.reason == "QUEUE_FULL"
    driver.run()
    for handle in range(1, 6):
        check_answer(driver, handle)


def test_the_smallest_pool_of_any_rank_bounds_a_request() -> None:
    driver = EngineDriver(topology=UNCOUPLED, attach=False)
    driver.attach(0, num_blocks=64)
    driver.attach(1, num_blocks=4)
    limits = driver.engine.facts.limits
    assert limits is not None
    assert limits.num_pool_tokens == 4 * 16
    driver.submit(1, make_prompt(60), max_tokens=5)
    end = driver.choices[1, 1].end
    assert end is not None
    assert end.error is not None
    assert end.error.reason == "KV_CAPACITY_EXCEEDED"


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"model_digest": "other"}, "it serves a different model"),
        (
            {"context_length": 8},
            "it serves a context of 8 tokens, the cell one of 512: all need the same --max-model-len",
        ),
        ({"logits_width": 7}, "it serves a different model"),
        ({"eos_token_ids": (1,)}, "it serves a different model"),
    ],
)
def test_a_rank_with_another_model_is_dropped(change: dict[str, object], difference: str) -> None:
    driver = EngineDriver(topology=UNCOUPLED, attach=False)
    driver.attach(0)
    [drop] = driver.attach(1, **change)
    assert drop == DropDomain(1, 2, difference, 0.5)
    assert [rank.is_attached for rank in driver.engine.state().ranks] == [True, False, False]
    assert driver.engine.state().counters.num_refused_models == 1


def test_a_silent_rank_ends_its_coupled_domain() -> None:
    driver = EngineDriver(topology=COUPLED)
    driver.silent_ranks = {1}
    driver.now = 5.0
    driver.on_event(TimePassed())
    assert [action for action in driver.actions if isinstance(action, DropDomain)] == [
        DropDomain(0, 1, "rank 1 is silent")
    ]
    assert not driver.engine.is_ready


def test_a_silent_uncoupled_rank_is_lost_alone() -> None:
    driver = EngineDriver(topology=UNCOUPLED)
    driver.silent_ranks = {1}
    driver.now = 5.0
    driver.on_event(TimePassed())
    assert [rank.is_attached for rank in driver.engine.state().ranks] == [True, False, True]


def test_a_request_of_a_lost_rank_is_not_moved_to_a_rank_lost_at_the_same_moment() -> None:
    driver = EngineDriver(topology=CellTopology(dp_size=2))
    submit_many(driver, 1)
    driver.silent_ranks = {0, 1}
    driver.now = 5.0
    driver.on_event(TimePassed())
    drops = [action.domain for action in driver.actions if isinstance(action, DropDomain)]
    assert (drops, [len(sent) for sent in driver.sent_to.values()]) == ([0, 1], [0, 0])
    driver.silent_ranks = set()
    driver.attach(0)
    driver.run()
    check_answer(driver, 1)


def test_an_idle_rank_takes_new_requests_that_wait_on_another() -> None:
    driver = EngineDriver(topology=CellTopology(dp_size=2), policy=SchedulerPolicy(max_num_seqs=1))
    driver.submit(1, make_prompt(20), max_tokens=2)
    driver.submit(2, make_prompt(20, 100), max_tokens=30)
    driver.submit(3, make_prompt(20, 200), max_tokens=2)
    driver.submit(4, make_prompt(20, 300), max_tokens=2)
    assert [rank.num_waiting for rank in driver.engine.state().ranks] == [1, 1]
    while driver.sent_to[0]:
        driver.step(0)
    # Rank 0 had the first and the third; rank 1 still has the second.
    assert [handle for _, handle in driver.choices] == [1, 3, 4]
    assert len(driver.sent_to[1]) == 1


@pytest.mark.parametrize("topology", TOPOLOGIES)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=25)
def test_no_death_at_any_time_loses_or_repeats_a_token(topology: CellTopology, seed: int) -> None:
    rng = Random(seed)
    policy = SchedulerPolicy(
        max_num_seqs=rng.choice([2, 4, 16]),
        max_num_batched_tokens=rng.choice([32, 64, 256]),
        enable_mixed_steps=rng.random() < 0.3,
        max_prefill_wait_steps=rng.choice([0, 0, 3]),
    )
    driver = EngineDriver(topology=topology, depth=rng.choice([1, 2, 3]), policy=policy, num_blocks=24, block_size=4)
    num_submitted, aborted = 6, set()
    submit_many(driver, num_submitted)
    for _ in range(60):
        ranks = [rank for rank, sent in driver.sent_to.items() if sent]
        if ranks:
            driver.step(rng.choice(ranks))
        if rng.random() < 0.08:
            domain = rng.randrange(topology.num_domains)
            driver.lose(domain) if domain in driver.epochs else driver.attach(domain)
        if rng.random() < 0.1 and driver.engine.is_ready:
            num_submitted += 1
            submit_many(driver, 1, first=num_submitted)
        if rng.random() < 0.05:
            handle = rng.randint(1, num_submitted)
            aborted.add(handle)
            driver.abort(handle)
    assert run_to_the_end(driver) == 0
    for handle in set(range(1, num_submitted + 1)) - aborted:
        end = driver.choices[1, handle].end
        # A request that was alone in two crashed steps in a row may be failed as poison.
        if end is None or end.error is None or end.error.reason != "POISON_REQUEST":
            check_answer(driver, handle)
    state = driver.engine.state()
    assert (state.num_used_blocks, state.num_suspects) == (0, 0)


@pytest.mark.parametrize("topology", [CellTopology(), UNCOUPLED, COUPLED])
@given(count=st.integers(1, 40), data=st.data())
@settings(max_examples=30)
def test_a_poison_request_ends_alone_after_few_deaths(topology: CellTopology, count: int, data: st.DataObject) -> None:
    victim = data.draw(st.integers(1, count), "victim")
    position = data.draw(st.integers(0, 5 + victim % 40 + 10), "position")
    depth = data.draw(st.integers(1, 2), "depth")
    budget = data.draw(st.sampled_from([64, 400, 16384]), "budget")
    policy = SchedulerPolicy(max_num_batched_tokens=budget)
    driver = EngineDriver(topology=topology, depth=depth, poison={victim: position}, num_blocks=256, policy=policy)
    submit_many(driver, count)
    num_deaths = run_to_the_end(driver)
    end = driver.choices[1, victim].end
    assert end is not None
    assert end.error is not None
    assert end.error.reason == "POISON_REQUEST"
    assert num_deaths <= 3 + math.log2(count)
    for handle in set(range(1, count + 1)) - {victim}:
        check_answer(driver, handle)
    state = driver.engine.state()
    assert (state.num_suspects, state.counters.num_poison_requests) == (0, 1)
