"""Models with recurrent state: where states are saved, what is computed again, and who waits for whom.

The worker's model computes each token from the live state, so a wrong restore gives wrong tokens.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from services.scheduler.cell.events import DropDomain
from services.scheduler.core.policy import CellTopology, SchedulerPolicy
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from shared.errors import NumericError
from shared.ids import RequestHandle
from tests.support.scheduler.cell_model import FallibleOracle, expected_completion
from tests.support.scheduler.engine_driver import EngineDriver

# Six full blocks of 16 and part of a seventh.
PROMPT = list(range(100, 200))


def make_driver(
    *,
    num_checkpoint_slots: int = 8,
    interval: int = 0,
    num_blocks: int = 256,
    block_size: int = 16,
    depth: int = 2,
    policy: SchedulerPolicy | None = None,
    topology: CellTopology | None = None,
    num_draft_tokens: int = 0,
) -> EngineDriver:
    return EngineDriver(
        num_draft_tokens=num_draft_tokens,
        oracle=FallibleOracle(Random(5), share_right=0.7),
        num_blocks=num_blocks,
        block_size=block_size,
        context_length=2048,
        policy=policy or SchedulerPolicy(max_num_seqs=64),
        depth=depth,
        num_checkpoint_slots=num_checkpoint_slots,
        state_checkpoint_interval=interval,
        topology=topology,
    )


def ask(driver: EngineDriver, handle: int, prompt: list[int], max_tokens: int = 4) -> int:
    """Run a request alone; returns its number of cached tokens."""
    driver.submit(handle, prompt, max_tokens=max_tokens)
    driver.run()
    choice = driver.choices[1, handle]
    assert choice.tokens == expected_completion(prompt, 0, max_tokens)
    assert choice.num_cached_tokens is not None
    return choice.num_cached_tokens


def chunks_of(driver: EngineDriver) -> list[tuple[int, int, bool]]:
    """Each chunk of the oldest step in flight as (slot, its tokens, whether its state is saved)."""
    batch = driver.sent[0].batch
    saved = {slot for slot, _ in batch.state_saves}
    chunks = [*batch.chunks, *(enter.chunk for enter in batch.enters)]
    return [(chunk.slot, chunk.num_tokens, chunk.slot in saved) for chunk in chunks]


def lost_tokens(driver: EngineDriver) -> int:
    return driver.engine.state().counters.num_prefix_tokens_lost_to_state


def test_the_second_request_finds_the_gap_and_saves_the_third_one_hits() -> None:
    driver = make_driver()
    assert ask(driver, 1, [*PROMPT, 1]) == 0
    assert (ask(driver, 2, [*PROMPT, 2]), lost_tokens(driver)) == (0, 96)
    assert (ask(driver, 3, [*PROMPT, 3]), lost_tokens(driver)) == (96, 96)
    # What is computed behind the state is not lost, it was never cached.
    assert driver.engine.state().counters.num_prefix_hit_tokens == 96


@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_all_round_to_blocks_alike(block_size: int) -> None:
    """Elsewhere there was a hit rate of 0, because five places rounded the boundary differently."""
    for num_shared in (block_size, 2 * block_size - 1, 2 * block_size, 2 * block_size + 1):
        driver = make_driver(block_size=block_size, interval=block_size + 1)
        for handle in range(2):
            ask(driver, handle, [*PROMPT[:num_shared], 1 + handle], max_tokens=1)
        expected = num_shared // block_size * block_size
        assert ask(driver, 2, [*PROMPT[:num_shared], 3], max_tokens=1) == expected


def test_drafts_change_neither_what_is_saved_of_prompts_nor_what_follows_them() -> None:
    driver = make_driver(num_draft_tokens=3)
    assert [ask(driver, handle, [*PROMPT, handle], max_tokens=40) for handle in range(3)] == [0, 0, 96]
    counters = driver.engine.state().counters
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("depth", [1, 3])
def test_with_drafts_the_next_turn_goes_on_where_the_last_answer_was_saved(depth: int, block_size: int) -> None:
    driver = make_driver(num_draft_tokens=3, depth=depth, block_size=block_size, num_blocks=4096 // block_size)
    prompt = [*PROMPT, 1]
    assert ask(driver, 1, prompt, max_tokens=800) == 0
    # Its newest record has taken the place of the older ones.
    assert driver.engine.state().num_used_checkpoints == 1
    # Renewed every 256 tokens, or later by a few steps that do not pass a block's end: the last time after 768. With
    # blocks of one token it is renewed four times as often.
    assert 512 <= ask(driver, 2, [*prompt, *driver.choices[1, 1].tokens, 3]) <= 900


@pytest.mark.parametrize(("interval", "num_times"), [(0, 2), (64, 2), (48, 1)])
def test_a_prompt_of_many_requests_at_once_is_computed_at_most_twice(interval: int, num_times: int) -> None:
    """The second one finds the gap, unless the first one has saved just there, and all others wait for its state."""
    policy = SchedulerPolicy(max_num_seqs=64, max_num_batched_tokens=60)
    driver = make_driver(interval=interval, policy=policy)
    for handle in range(50):
        driver.submit(handle, [*PROMPT, handle], max_tokens=2)
    num_computed = 0
    while driver.sent:
        num_computed += sum(num_tokens for _, num_tokens, _ in chunks_of(driver))
        driver.step()
    assert all(driver.choices[1, handle].tokens == expected_completion([*PROMPT, handle], 0, 2) for handle in range(50))
    assert [driver.choices[1, handle].num_cached_tokens for handle in range(2, 50)] == [96] * 48
    # Each computes its own five tokens.
    assert num_computed <= 96 * num_times + 50 * 5
    assert lost_tokens(driver) == num_computed - 96 - 50 * 5


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_choices_wait_for_the_first_ones_state_and_compute_the_prompt_once(depth: int) -> None:
    driver = make_driver(depth=depth)
    driver.submit(1, PROMPT, n=8, max_tokens=3)
    assert chunks_of(driver)[0] == (0, 96, True)
    driver.run()
    assert [driver.choices[1, 1 + choice].num_cached_tokens for choice in range(8)] == [0, *[96] * 7]
    for choice in range(8):
        assert driver.choices[1, 1 + choice].tokens == expected_completion(PROMPT, 0, 3, choice)
    assert lost_tokens(driver) == 0


def test_chunks_end_where_states_are_saved() -> None:
    policy = SchedulerPolicy(max_num_seqs=8, max_num_batched_tokens=60)
    driver = make_driver(interval=40, policy=policy, depth=1)
    driver.submit(1, PROMPT, max_tokens=1)
    sent = []
    while driver.sent:
        sent += chunks_of(driver)
        driver.step()
    # Every 40 tokens, rounded up to blocks: after 48 and 96.
    assert sent == [(0, 48, True), (0, 48, True), (0, 4, False)]
    assert ask(driver, 2, [*PROMPT[:60], 1]) == 48
    # The rest of its prompt is new: only the state at the next point is worth a save.
    assert ask(driver, 3, [*PROMPT[:97], 5, 6]) == 96


def test_without_chunks_no_prompt_is_cut() -> None:
    driver = make_driver(interval=16, policy=SchedulerPolicy(max_num_seqs=8, enable_chunked_prefill=False))
    driver.submit(1, PROMPT[:32], max_tokens=1)
    assert chunks_of(driver) == [(0, 32, True)]
    driver.run()
    assert ask(driver, 2, PROMPT) == 32
    assert ask(driver, 3, PROMPT) == 32


def test_the_next_turn_of_a_conversation_finds_the_record_of_the_last_one() -> None:
    driver = make_driver(num_checkpoint_slots=1)
    # Tokens that are computed: the prompt's and all but the last of the completion.
    assert ask(driver, 1, PROMPT, max_tokens=430) == 0
    turn = [*PROMPT, *driver.choices[1, 1].tokens, 5, 6, 7]
    # The only checkpoint was renewed in place, after 256 and 512 tokens.
    assert ask(driver, 2, turn) == 512
    assert driver.engine.state().counters.num_prefix_tokens_lost_to_state == 16


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_with_blocks_of_one_token_the_next_turn_loses_little(depth: int) -> None:
    driver = make_driver(block_size=1, num_blocks=2048, depth=depth)
    # The end at `max_tokens` is known when the last step is planned: all that was computed is found.
    assert ask(driver, 1, PROMPT, max_tokens=75) == 0
    turn = [*PROMPT, *driver.choices[1, 1].tokens, 5, 6, 7]
    assert (ask(driver, 2, turn), lost_tokens(driver)) == (174, 0)
    # Any other end is known when steps behind it are in flight.
    answer = expected_completion(turn, 0, 80)
    end = next(number for number in range(60, 80) if answer[number] not in answer[:number])
    driver.submit(3, turn, max_tokens=200, stop_token_ids=(answer[end],))
    driver.run()
    assert driver.choices[1, 3].tokens == answer[: end + 1]
    num_computed = len(turn) + end
    assert ask(driver, 4, [*turn, *answer[: end + 1], 8]) == num_computed // 64 * 64


def test_a_preempted_sequence_goes_back_to_its_record() -> None:
    driver = make_driver(num_blocks=36, policy=SchedulerPolicy(max_num_seqs=4))
    driver.submit(1, PROMPT[:20], max_tokens=300)
    driver.submit(2, PROMPT[20:40], max_tokens=290)
    driver.run()
    counters = driver.engine.state().counters
    assert counters.num_preemptions
    for handle, prompt, num_tokens in ((1, PROMPT[:20], 300), (2, PROMPT[20:40], 290)):
        assert driver.choices[1, handle].tokens == expected_completion(prompt, 0, num_tokens)
    assert counters.num_prefix_hit_tokens == 256 * counters.num_preemptions
    assert counters.num_prefix_tokens_lost_to_state < 256 * counters.num_preemptions


def test_a_request_waits_for_a_state_of_a_step_in_flight_and_no_longer() -> None:
    driver = make_driver(depth=3)
    ask(driver, 1, PROMPT)
    driver.submit(2, [*PROMPT, 2], max_tokens=30)
    assert chunks_of(driver) == [(0, 96, True)]
    driver.submit(3, [*PROMPT, 3], max_tokens=30)
    assert driver.engine.state().num_waiting == 1
    driver.step()
    # The step with the save has returned.
    assert driver.engine.state().num_waiting == 0
    driver.run()
    assert driver.choices[1, 3].num_cached_tokens == 96


def test_others_pass_one_that_waits_for_a_state() -> None:
    driver = make_driver(depth=2)
    ask(driver, 1, PROMPT)
    driver.submit(5, [5, 6], max_tokens=3)
    driver.submit(2, [*PROMPT, 2], n=3, max_tokens=3)
    for handle in range(10, 20):
        driver.submit(handle, [*PROMPT, handle], max_tokens=3)
        driver.submit(handle + 10, [handle], max_tokens=1)
    driver.step()
    # The other two choices and ten requests wait; all that share nothing pass them.
    entered = [enter.chunk.num_tokens for enter in driver.sent[-1].batch.enters]
    assert (entered, driver.engine.state().num_waiting) == ([96, *[1] * 10], 12)
    driver.step()
    driver.step()
    # The state has come.
    assert driver.engine.state().num_waiting == 0
    driver.run()
    assert [driver.choices[1, handle].num_cached_tokens for handle in (2, 3, 4, *range(10, 20))] == [0, *[96] * 12]


def test_nothing_passes_an_aged_request_that_waits_for_a_state() -> None:
    driver = make_driver(depth=2, policy=SchedulerPolicy(max_num_seqs=8, max_age_s=1.0))
    ask(driver, 1, PROMPT)
    driver.submit(5, [5, 6], max_tokens=3)
    for handle, prompt in ((2, [*PROMPT, 2]), (3, [*PROMPT, 3]), (4, [1, 2, 3])):
        driver.submit(handle, prompt, max_tokens=3)
    driver.now += 1.5
    driver.step()
    assert (len(driver.sent[-1].batch.enters), driver.engine.state().num_waiting) == (1, 2)
    driver.run()
    assert driver.choices[1, 3].num_cached_tokens == 96


@pytest.mark.parametrize("how", ["abort", "not finite", "lost"])
def test_a_save_that_comes_to_nothing_keeps_nobody_waiting(how: str) -> None:
    driver = make_driver(depth=2)
    ask(driver, 1, PROMPT)
    driver.submit(2, [*PROMPT, 2], max_tokens=30)
    driver.submit(3, [*PROMPT, 3], max_tokens=5)
    if how == "abort":
        driver.abort(2)
    elif how == "lost":
        driver.lose()
        driver.attach()
    else:
        result = driver.worker.run(driver.sent.pop(0))
        driver.return_result(replace(result, not_finite_saves=np.array([0], np.int32)))
    driver.run()
    assert driver.choices[1, 3].tokens == expected_completion([*PROMPT, 3], 0, 5)
    # An aborted request's step still saves.
    assert driver.choices[1, 3].num_cached_tokens == {"abort": 96, "not finite": 0, "lost": 0}[how]


def test_a_numeric_error_withdraws_the_states_of_its_sequence() -> None:
    driver = make_driver(depth=1)
    ask(driver, 1, PROMPT)
    ask(driver, 2, PROMPT)
    assert driver.engine.state().num_used_checkpoints == 1
    driver.submit(3, PROMPT, max_tokens=30)
    result = driver.worker.run(driver.sent.pop(0))
    driver.return_result(replace(result, not_finite_rows=np.array([0], np.int32)))
    end = driver.choices[1, 3].end
    assert end is not None
    assert isinstance(end.error, NumericError)
    assert driver.engine.state().num_used_checkpoints == 0
    assert ask(driver, 4, PROMPT) == 0


def test_a_result_with_a_save_that_was_not_asked_for_ends_the_epoch() -> None:
    driver = make_driver(depth=1)
    driver.submit(1, PROMPT)
    result = driver.worker.run(driver.sent.pop(0))
    actions = driver.return_result(replace(result, not_finite_saves=np.array([0], np.int32)))
    assert DropDomain in [type(action) for action in actions]


def test_placement_counts_tokens_that_can_be_continued() -> None:
    topology = CellTopology(dp_size=2)
    driver = make_driver(topology=topology, policy=SchedulerPolicy(max_num_seqs=8, placement_tokens_per_seq=1))
    driver.submit(1, PROMPT, max_tokens=1)
    driver.run()
    driver.submit(2, [7, 8, 9], max_tokens=20)
    # The first rank has cached the prompt, but no state of it; so its load decides.
    driver.submit(3, PROMPT, n=2, max_tokens=1)
    assert [len(steps) > 0 for steps in driver.sent_to.values()] == [True, True]
    driver.run()
    driver.submit(7, [7, 8, 9, 10], max_tokens=20)
    driver.submit(8, [7, 8, 9, 11], max_tokens=20)
    driver.submit(9, PROMPT, max_tokens=1)
    driver.run()
    assert driver.choices[1, 9].num_cached_tokens == 96


def test_the_longest_prefix_is_the_longest_that_can_be_continued() -> None:
    driver = make_driver(policy=SchedulerPolicy(max_num_seqs=1, queue_policy=QueuePolicy.LONGEST_PREFIX))
    short = list(range(500, 540))
    for handle in (1, 2):
        ask(driver, handle, [*short, 1])
    ask(driver, 3, PROMPT)
    driver.submit(4, [7, 8, 9], max_tokens=3)
    # Of the first, more is cached; of the second, more can be used.
    driver.submit(5, [*PROMPT, 2], max_tokens=1)
    driver.submit(6, [*short, 3], max_tokens=1)
    driver.run()
    assert driver.choices[1, 6].num_cached_tokens == 32
    finished = [end.handle for each in driver.delivered for end in each.outputs.ends]
    assert finished.index(RequestHandle(6)) < finished.index(RequestHandle(5))
