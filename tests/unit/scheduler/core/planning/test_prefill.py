"""Which prompts enter a step and how much of them it computes: budget, blocks, cached prefixes and chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.core.admission import AdmissionPolicy
from services.scheduler.core.batch.sequence import Sequence, SequenceStatus, SequenceType
from services.scheduler.core.planning.decode import Decodes
from services.scheduler.core.planning.prefill import Prefill
from services.scheduler.core.policy import SchedulerPolicy
from shared.ids import Slot
from shared.request.sampling_params import Pooling, SamplingOptions
from shared.step.step import EnteringSequence, PrefillChunk
from tests.support.scheduler.core import Parts, add, completion_of, give, make_scheduler, make_sequence, prompt_of
from tests.support.scheduler.core import send as schedule
from tests.support.scheduler.engine_driver import EOS, token_bytes, worker_facts
from tests.support.worker.worker_steps import unpack

SMALL_STEPS = SchedulerPolicy(max_num_seqs=8, max_num_batched_tokens=8)


def make_parts(policy: SchedulerPolicy | None = None, *, num_blocks: int = 64) -> Parts:
    """Parts with blocks of 4 tokens."""
    return Parts(policy, num_blocks=num_blocks, block_size=4)


def sent(prefill: Prefill) -> list[tuple[int, int, int]]:
    """Each chunk as (slot, its tokens, later tokens): prompts that continue, then those that enter."""
    chunks = [*prefill.chunks, *(entering.chunk for entering in prefill.enters)]
    return [(chunk.slot, chunk.num_tokens, chunk.num_later_tokens) for chunk in chunks]


def send(parts: Parts, prefill: Prefill) -> None:
    parts.send(Decodes(), prefill)


def admit_alone(parts: Parts, seq: Sequence) -> EnteringSequence:
    """Send a step that a sequence enters."""
    parts.add(seq)
    prefill = parts.plan_prefill()
    send(parts, prefill)
    [entering] = prefill.enters
    return entering


# Admission


def test_waiting_prompts_enter_in_order_within_the_budget() -> None:
    parts = make_parts()
    first, second, third = (make_sequence(handle, 4 + handle) for handle in range(1, 4))
    parts.add(first, second, third)
    prefill = parts.plan_prefill(budget=12)
    assert (sent(prefill), prefill.budget) == ([(0, 5, 0), (1, 6, 0)], 1)
    assert list(parts.waiting) == [third]
    assert parts.running.sequences() == [first, second]
    assert (first.status, first.type) == (SequenceStatus.RUNNING, SequenceType.DECODE)


def test_a_prompt_enters_a_budget_that_it_fills_exactly() -> None:
    parts = make_parts()
    parts.add(make_sequence(1, 5))
    assert parts.plan_prefill(budget=4).is_empty
    assert sent(parts.plan_prefill(budget=5)) == [(0, 5, 0)]


def test_the_first_prompt_that_does_not_fit_stops_admission() -> None:
    parts = make_parts()
    first, long, short = make_sequence(1, 5), make_sequence(2, 10), make_sequence(3, 2)
    parts.add(first, long, short)
    assert sent(parts.plan_prefill(budget=8)) == [(0, 5, 0)]
    # Not even the short one enters, which would fit.
    assert list(parts.waiting) == [long, short]


def test_nothing_enters_without_a_slot_or_a_permission() -> None:
    parts = make_parts(SchedulerPolicy(max_num_seqs=1))
    parts.add(make_sequence(1, 5), make_sequence(2, 5))
    assert parts.plan_prefill(may_admit=False).is_empty
    assert sent(parts.plan_prefill()) == [(0, 5, 0)]
    assert parts.plan_prefill().is_empty


def test_a_prompt_whose_blocks_are_not_free_changes_nothing() -> None:
    parts = make_parts(num_blocks=4)
    first, second = make_sequence(1, 9), make_sequence(2, 5)
    parts.add(first, second)
    assert sent(parts.plan_prefill()) == [(0, 9, 0)]
    assert (second.slot, second.block_table.tolist(), second.num_first_cached_tokens) == (None, [], None)
    assert (parts.blocks.num_free_blocks, list(parts.waiting)) == (1, [second])


def test_the_worker_is_told_all_it_needs_to_know_of_an_entering_sequence() -> None:
    parts = make_parts()
    seq = make_sequence(1, 6, max_tokens=9, choice=2)
    entering = admit_alone(parts, seq)
    assert entering == EnteringSequence(
        PrefillChunk(Slot(0), bytes(seq.token_bytes), 0),
        num_cached_tokens=0,
        num_prompt_tokens=6,
        block_bytes=token_bytes([0, 1]),
        params=seq.params,
        choice=2,
    )
    assert entering.max_num_tokens == 15
    # The plan keeps its blocks when the sequence's table grows.
    seq.block_table.append(9)
    assert unpack(entering.block_bytes) == [0, 1]


@pytest.mark.parametrize(("ignore_eos", "stops"), [(False, (3, EOS, 9)), (True, (3, 9))])
def test_the_worker_is_told_the_stop_tokens_that_may_not_be_sampled_before_min_tokens(
    ignore_eos: bool, stops: tuple[int, ...]
) -> None:
    params = {"stop_token_ids": (9, 3), "ignore_eos": ignore_eos}
    parts = make_parts()
    assert admit_alone(parts, make_sequence(1, 5, **params)).stop_token_ids == ()  # type: ignore[arg-type]
    options = SamplingOptions(min_tokens=2)
    entering = admit_alone(parts, make_sequence(2, 5, options=options, **params))  # type: ignore[arg-type]
    assert entering.stop_token_ids == stops


# Cached prefixes


def test_a_cached_prefix_is_not_computed_and_not_charged() -> None:
    parts = make_parts()
    first = make_sequence(1, 10)
    admit_alone(parts, first)
    second = make_sequence(2, [*prompt_of(first)[:9], 77])
    parts.add(second)
    prefill = parts.plan_prefill(budget=2)
    [entering] = prefill.enters
    assert (entering.num_cached_tokens, entering.chunk.token_bytes) == (8, token_bytes([1008, 77]))
    assert unpack(entering.block_bytes) == [0, 1, 3]
    assert (prefill.budget, second.num_first_cached_tokens, first.num_first_cached_tokens) == (0, 8, 0)
    assert (parts.counters.num_prefix_queried_tokens, parts.counters.num_prefix_hit_tokens) == (20, 8)


def test_at_least_one_token_of_a_cached_prompt_is_computed() -> None:
    parts = make_parts()
    admit_alone(parts, make_sequence(1, 8))
    entering = admit_alone(parts, make_sequence(2, prompt_of(make_sequence(1, 8))))
    assert (entering.num_cached_tokens, entering.chunk.num_tokens) == (4, 4)


@pytest.mark.parametrize("share_in_step", [True, False])
def test_a_prefix_that_the_step_computes_is_shared_in_it_or_with_the_next_step(share_in_step: bool) -> None:
    parts = make_parts(SchedulerPolicy(max_num_seqs=8, share_in_step=share_in_step))
    first, other = make_sequence(1, 9), make_sequence(2, 9)
    parts.add(first, other, make_sequence(3, prompt_of(first)))
    prefill = parts.plan_prefill()
    # Sequences that share nothing enter together in any case.
    assert sent(prefill) == [(0, 9, 0), (1, 9, 0), *([(2, 1, 0)] if share_in_step else [])]
    send(parts, prefill)
    assert sent(parts.plan_prefill()) == ([] if share_in_step else [(2, 1, 0)])


def test_without_checkpoints_a_model_with_recurrent_state_computes_every_prompt_whole() -> None:
    scheduler = make_scheduler(facts=worker_facts(num_checkpoint_slots=0))
    prompt = list(range(40))
    add(scheduler, make_sequence(1, prompt), make_sequence(2, prompt))
    entering = schedule(scheduler).enters
    give(scheduler, 1, 2)
    add(scheduler, make_sequence(3, prompt))
    entering += schedule(scheduler).enters
    assert [(enter.num_cached_tokens, enter.chunk.num_tokens) for enter in entering] == [(0, 40)] * 3
    assert scheduler.num_cached_tokens(make_sequence(4, prompt)) == 0


def test_a_block_that_a_later_chunk_completes_is_shared_with_the_next_step_too() -> None:
    parts = make_parts(SchedulerPolicy(max_num_seqs=8, max_num_batched_tokens=6, share_in_step=False))
    first = make_sequence(1, 10)
    parts.add(first, make_sequence(2, prompt_of(first)[:9]))
    send(parts, parts.plan_prefill(budget=6))
    # The second chunk completes the block of the tokens 4 to 7; the other prompt would need one token of the rest.
    prefill = parts.plan_prefill(budget=6)
    assert (sent(prefill), prefill.budget) == ([(0, 4, 0)], 2)
    send(parts, prefill)
    assert sent(parts.plan_prefill(budget=6)) == [(1, 1, 0)]


def test_prompt_log_probabilities_are_computed_though_the_prompt_is_cached() -> None:
    parts = make_parts()
    prompt = prompt_of(make_sequence(1, 9))
    admit_alone(parts, make_sequence(1, prompt))
    options = SamplingOptions(num_prompt_logprobs=1)
    scored = make_sequence(2, prompt, options=options)
    entering = admit_alone(parts, scored)
    assert (entering.num_cached_tokens, entering.chunk.num_tokens, entering.params.options) == (0, 9, options)
    # What it computed is shared like any other prefix.
    assert unpack(admit_alone(parts, make_sequence(3, prompt)).block_bytes)[:2] == scored.block_table[:2].tolist()


def test_a_mean_is_computed_of_the_whole_prompt_and_the_last_state_after_what_is_cached() -> None:
    parts = make_parts()
    prompt = prompt_of(make_sequence(1, 9))
    admit_alone(parts, make_sequence(1, prompt))
    for handle, (pooling, num_cached) in enumerate(((Pooling.MEAN, 0), (Pooling.LAST, 8)), 2):
        entering = admit_alone(parts, make_sequence(handle, prompt, options=SamplingOptions(pooling=pooling)))
        assert entering.num_cached_tokens == num_cached


def test_a_further_choice_uses_the_cache_and_asks_for_no_prompt_log_probabilities() -> None:
    parts = make_parts()
    prompt, options = prompt_of(make_sequence(1, 9)), SamplingOptions(num_prompt_logprobs=1)
    admit_alone(parts, make_sequence(1, prompt, options=options))
    entering = admit_alone(parts, make_sequence(2, prompt, options=options, choice=1))
    assert (entering.num_cached_tokens, entering.params.options) == (8, None)
    options = replace(options, num_logprobs=3)
    entering = admit_alone(parts, make_sequence(3, prompt, options=options, choice=2))
    assert entering.params.options == SamplingOptions(num_logprobs=3)


def test_the_worker_gets_the_cached_tokens_only_if_it_needs_them() -> None:
    prompt = prompt_of(make_sequence(1, 9))
    cached = token_bytes(prompt[:8])
    penalty = SamplingOptions(repetition_penalty=1.1)
    for needs_all, options, expected in ((False, None, b""), (False, penalty, cached), (True, None, cached)):
        facts = replace(worker_facts(), needs_all_tokens=needs_all)
        parts = Parts(block_size=4, facts=facts)
        assert admit_alone(parts, make_sequence(1, prompt, options=options)).cached_token_bytes == b""
        assert admit_alone(parts, make_sequence(2, prompt, options=options)).cached_token_bytes == expected


def test_the_next_sequence_needs_the_blocks_that_no_running_one_holds() -> None:
    parts = make_parts()
    first = make_sequence(1, 9)
    admit_alone(parts, first)
    second = make_sequence(2, [*prompt_of(first), *range(6)])
    parts.add(second)
    assert parts.prefill.next_waiting(0.0) == (second, 2)


def test_a_preempted_sequence_computes_its_own_tokens_too_but_reports_its_first_prefix() -> None:
    parts = make_parts()
    seq = make_sequence(1, 6)
    admit_alone(parts, seq)
    parts.give(501, now=0.0)
    parts.preemption.preempt(seq, 1.0)
    [entering] = parts.plan_prefill().enters
    assert (entering.num_prompt_tokens, entering.num_cached_tokens) == (6, 4)
    assert entering.chunk.token_bytes == token_bytes([1004, 1005, 501])
    assert (completion_of(seq), seq.num_first_cached_tokens) == ([501], 0)


# Chunks


def test_a_prompt_above_the_budget_is_sent_in_chunks_with_blocks_for_all_of_it() -> None:
    parts = make_parts(SMALL_STEPS)
    seq, other = make_sequence(1, 20), make_sequence(2, 4)
    parts.add(seq, other)
    prefill = parts.plan_prefill(budget=8)
    assert (sent(prefill), unpack(prefill.enters[0].block_bytes)) == ([(0, 8, 12)], [0, 1, 2, 3, 4])
    assert (parts.running.begun, seq.type) == ([seq], SequenceType.PREFILL)
    # The full blocks of a chunk can be found once it is sent.
    assert parts.num_cached_tokens(prompt_of(seq)) == 8
    send(parts, prefill)
    prefill = parts.plan_prefill(budget=8)
    assert (sent(prefill), prefill.chunks[0].token_bytes) == ([(0, 8, 4)], token_bytes(prompt_of(seq)[8:16]))
    send(parts, prefill)
    # The last chunk leaves room for the next prompt.
    prefill = parts.plan_prefill(budget=8)
    assert (sent(prefill), prefill.budget) == ([(0, 4, 0), (1, 4, 0)], 0)
    assert (parts.running.begun, seq.type, parts.running.decode_rows.tolist()) == ([], SequenceType.DECODE, [0, 1])


def test_only_a_begun_prompt_continues_when_none_may_enter() -> None:
    parts = make_parts(SMALL_STEPS)
    parts.add(make_sequence(1, 10), make_sequence(2, 4))
    send(parts, parts.plan_prefill(budget=8))
    assert sent(parts.plan_prefill(budget=8, may_admit=False)) == [(0, 2, 0)]


@pytest.mark.parametrize("budget", [0, -3])
def test_without_a_budget_nothing_is_sent(budget: int) -> None:
    parts = make_parts(SMALL_STEPS)
    parts.add(make_sequence(1, 10), make_sequence(2, 4))
    send(parts, parts.plan_prefill(budget=8))
    prefill = parts.plan_prefill(budget=budget)
    assert (prefill.is_empty, prefill.budget) == (True, 0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"enable_mixed_steps": True}, [(1, 3, 5)]),
        ({"enable_mixed_steps": True, "enable_chunked_prefill": False}, []),
    ],
)
def test_a_prompt_that_fits_a_step_of_its_own_is_cut_only_for_mixed_steps(
    changes: dict[str, bool], expected: list[tuple[int, int, int]]
) -> None:
    parts = make_parts(replace(SMALL_STEPS, **changes))  # type: ignore[arg-type]
    parts.add(make_sequence(1, 5), make_sequence(2, 8))
    assert sent(parts.plan_prefill(budget=8)) == [(0, 5, 0), *expected]


def test_what_is_cached_decides_whether_a_prompt_fits_a_step() -> None:
    parts = make_parts(SMALL_STEPS)
    first = make_sequence(1, 8)
    parts.add(first)
    send(parts, parts.plan_prefill(budget=8))
    # Its 12 tokens would need chunks. The 4 that are not cached do not: they wait for a step that has room for them.
    parts.add(make_sequence(2, 5), make_sequence(3, [*prompt_of(first), 1, 2, 3, 4]))
    assert sent(parts.plan_prefill(budget=8)) == [(1, 5, 0)]
    assert sent(parts.plan_prefill(budget=8)) == [(2, 4, 0)]


def test_without_chunks_a_prompt_above_the_budget_does_not_enter() -> None:
    parts = make_parts(replace(SMALL_STEPS, enable_chunked_prefill=False))
    parts.add(make_sequence(1, 9))
    assert parts.plan_prefill(budget=8).is_empty


# Room to grow


@pytest.mark.parametrize(("max_tokens", "enters"), [(54, True), (55, False)])
def test_looking_ahead_a_prompt_enters_while_the_expected_growth_of_all_fits(max_tokens: int, enters: bool) -> None:
    policy = SchedulerPolicy(max_num_seqs=8, admission_policy=AdmissionPolicy.LOOK_AHEAD)
    parts = make_parts(policy, num_blocks=16)
    # On an idle rank the first one enters, whatever it may grow to.
    admit_alone(parts, make_sequence(1, 4, max_tokens=20))
    # 60 tokens are free: 8 for its prompt, and 0.7 of what both may still generate, 20 and `max_tokens`.
    parts.add(make_sequence(2, 8, max_tokens=max_tokens))
    assert (not parts.plan_prefill().is_empty) is enters


def test_on_an_idle_rank_a_prompt_enters_whatever_it_may_grow_to() -> None:
    policy = SchedulerPolicy(max_num_seqs=8, admission_policy=AdmissionPolicy.LOOK_AHEAD)
    parts = make_parts(policy, num_blocks=4)
    parts.add(make_sequence(1, 4, max_tokens=1000))
    assert sent(parts.plan_prefill()) == [(0, 4, 0)]
