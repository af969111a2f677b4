"""Which request goes first, which is admitted and which is preempted, under each configurable policy."""

from __future__ import annotations

import pytest

from services.scheduler.core.admission import AdmissionPolicy
from services.scheduler.core.batch.sequence import Priority
from services.scheduler.core.policy import RetractionPolicy, SchedulerPolicy
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.engine_driver import EngineDriver


def prompt(num_tokens: int, start: int = 0) -> list[int]:
    return [(start + 3 * index) % 900 for index in range(num_tokens)]


def order_of_first_tokens(driver: EngineDriver) -> list[int]:
    """Run to the end; returns the handles in the order of their first tokens."""
    order: list[int] = []
    while True:
        order += [handle for (_, handle), output in driver.choices.items() if output.tokens and handle not in order]
        if not driver.sent:
            return order
        driver.step()


def by_priority(**changes: object) -> SchedulerPolicy:
    return SchedulerPolicy(queue_policy=QueuePolicy.PRIORITY, **changes)  # type: ignore[arg-type]


def test_more_urgent_classes_go_first_each_in_order_of_arrival() -> None:
    driver = EngineDriver(policy=by_priority(max_num_seqs=1, max_age_s=1000.0))
    driver.submit(1, prompt(5), priority=Priority.HIGH)
    for handle, priority in [(2, Priority.LOW), (3, Priority.NORMAL), (4, Priority.HIGH), (5, Priority.NORMAL)]:
        driver.submit(handle, prompt(5), priority=priority)
    assert order_of_first_tokens(driver) == [1, 4, 3, 5, 2]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_higher_class_preempts_a_lower_one_when_slots_run_out(depth: int) -> None:
    driver = EngineDriver(policy=by_priority(max_num_seqs=2), depth=depth)
    driver.submit(1, prompt(5), priority=Priority.LOW, max_tokens=30)
    driver.submit(2, prompt(5, 7), priority=Priority.NORMAL, max_tokens=30)
    driver.step()
    driver.submit(3, prompt(5, 9), priority=Priority.HIGH, max_tokens=3)
    driver.submit(4, prompt(5, 11), priority=Priority.LOW, max_tokens=3)
    for _ in range(depth + 3):
        driver.step()
    assert driver.choices[1, 3].end is not None
    assert driver.engine.state().counters.num_preemptions == 1
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(prompt(5), 0, 30)
    assert driver.choices[1, 2].tokens == expected_completion(prompt(5, 7), 0, 30)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_higher_class_preempts_as_few_as_needed_when_blocks_run_out(depth: int) -> None:
    driver = EngineDriver(num_blocks=8, policy=by_priority(), depth=depth)
    for handle in (1, 2, 3):
        driver.submit(handle, prompt(20, handle), priority=Priority.LOW, max_tokens=10)
    driver.step()
    # Six blocks are taken; three are needed, so one of the three must be preempted.
    driver.submit(4, prompt(40, 100), priority=Priority.NORMAL, max_tokens=8)
    driver.step()
    assert driver.engine.state().counters.num_preemptions == 1
    assert order_of_first_tokens(driver) == [1, 2, 3, 4]
    for handle in (1, 2, 3):
        assert driver.choices[1, handle].tokens == expected_completion(prompt(20, handle), 0, 10)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("retraction", RetractionPolicy)
def test_a_row_for_which_others_were_preempted_is_not_preempted_when_they_grow(
    retraction: RetractionPolicy, depth: int
) -> None:
    driver = EngineDriver(num_blocks=8, policy=by_priority(retraction_policy=retraction), depth=depth)
    for handle in (1, 2, 3):
        driver.submit(handle, prompt(20, handle), priority=Priority.LOW, max_tokens=70)
    driver.step()
    driver.submit(4, prompt(40, 100), priority=Priority.HIGH, max_tokens=20)
    num_entries = 0
    while (1, 4) not in driver.choices or driver.choices[1, 4].end is None:
        num_entries += sum(entering.num_prompt_tokens == 40 for entering in driver.sent[0].batch.enters)
        driver.step()
    assert num_entries == 1
    driver.run()
    for handle in (1, 2, 3):
        assert driver.choices[1, handle].tokens == expected_completion(prompt(20, handle), 0, 70)


def test_no_sequence_is_preempted_if_that_would_not_be_enough() -> None:
    driver = EngineDriver(num_blocks=8, policy=by_priority())
    driver.submit(1, prompt(40), priority=Priority.HIGH, max_tokens=20)
    driver.submit(2, prompt(20), priority=Priority.LOW, max_tokens=8)
    driver.step()
    driver.submit(3, prompt(100, 7), priority=Priority.NORMAL, max_tokens=8)
    driver.step()
    assert driver.engine.state().counters.num_preemptions == 0
    driver.run()
    assert driver.choices[1, 3].tokens == expected_completion(prompt(100, 7), 0, 8)


def test_a_class_preempts_only_lower_ones_and_only_under_the_priority_policy() -> None:
    for policy in (by_priority(max_num_seqs=1), SchedulerPolicy(max_num_seqs=1)):
        driver = EngineDriver(policy=policy)
        driver.submit(1, prompt(5), priority=Priority.NORMAL, max_tokens=20)
        driver.step()
        same = Priority.NORMAL if policy.queue_policy is QueuePolicy.PRIORITY else Priority.HIGH
        driver.submit(2, prompt(5), priority=same, max_tokens=2)
        driver.run()
        assert driver.engine.state().counters.num_preemptions == 0


def test_a_request_that_has_waited_too_long_goes_first_and_is_no_longer_preempted() -> None:
    driver = EngineDriver(policy=by_priority(max_num_seqs=1, max_age_s=10.0))
    driver.submit(1, prompt(5), priority=Priority.HIGH, max_tokens=12)
    driver.submit(2, prompt(5, 9), priority=Priority.LOW, max_tokens=12)
    for _ in range(11):
        driver.step()
    driver.submit(3, prompt(5, 20), priority=Priority.HIGH, max_tokens=2)
    assert order_of_first_tokens(driver) == [1, 2, 3]
    assert driver.engine.state().counters.num_preemptions == 0


def test_the_longest_cached_prefix_goes_first() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=1, queue_policy=QueuePolicy.LONGEST_PREFIX))
    driver.submit(1, prompt(64, 5), max_tokens=2)
    driver.run()
    driver.submit(2, prompt(5), max_tokens=6)
    driver.step()
    driver.submit(3, prompt(64, 300), max_tokens=1)
    driver.submit(4, prompt(33, 5), max_tokens=1)
    driver.submit(5, prompt(64, 5), max_tokens=1)
    assert order_of_first_tokens(driver) == [1, 2, 5, 4, 3]


def test_looking_ahead_avoids_preemptions_that_the_plain_rule_causes() -> None:
    preemptions = {}
    for admission in AdmissionPolicy:
        driver = EngineDriver(num_blocks=16, policy=SchedulerPolicy(admission_policy=admission))
        for handle in range(8):
            driver.submit(handle, prompt(17, handle), max_tokens=60)
        driver.run()
        preemptions[admission] = driver.engine.state().counters.num_preemptions
        for handle in range(8):
            assert driver.choices[1, handle].tokens == expected_completion(prompt(17, handle), 0, 60)
    assert preemptions[AdmissionPolicy.LOOK_AHEAD] < preemptions[AdmissionPolicy.PLAIN]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("retraction", RetractionPolicy)
@pytest.mark.parametrize("block_size", [1, 16])
def test_outputs_do_not_depend_on_which_request_is_preempted(
    retraction: RetractionPolicy, depth: int, block_size: int
) -> None:
    driver = EngineDriver(
        num_blocks=160 // block_size,
        block_size=block_size,
        depth=depth,
        policy=SchedulerPolicy(retraction_policy=retraction),
    )
    for handle in range(6):
        driver.submit(handle, prompt(20 + 5 * handle, handle), max_tokens=50)
        driver.step()
    driver.run()
    for handle in range(6):
        assert driver.choices[1, handle].tokens == expected_completion(prompt(20 + 5 * handle, handle), 0, 50)
    assert driver.engine.state().counters.num_preemptions > 0


def test_salts_keep_prefixes_apart() -> None:
    driver = EngineDriver()
    for handle, salt in [(1, b""), (2, b"a"), (3, b"b"), (4, b"a"), (5, b"")]:
        driver.submit(handle, prompt(40), cache_salt=salt, max_tokens=1)
        driver.run()
    assert [driver.choices[1, handle].num_cached_tokens for handle in (1, 2, 3, 4, 5)] == [0, 0, 0, 32, 32]


def test_a_flushed_prefix_is_never_matched() -> None:
    driver = EngineDriver()
    driver.submit(1, prompt(40), max_tokens=1)
    driver.run()
    driver.submit(2, prompt(40, 7), max_tokens=30)
    driver.step()
    assert driver.engine.flush_prefix_cache() > 0
    driver.run()
    for handle, start in [(3, 0), (4, 7)]:
        driver.submit(handle, prompt(40, start), max_tokens=1)
        driver.run()
        assert driver.choices[1, handle].num_cached_tokens == 0
    assert driver.choices[1, 2].tokens == expected_completion(prompt(40, 7), 0, 30)
