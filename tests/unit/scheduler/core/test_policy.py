"""The budget of a step where none is set: the workers' proposal, with which decodes never wait for long prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.cell.events import Exit
from services.scheduler.core.batch.step import ScheduledBatch, Step
from services.scheduler.core.policy import CellTopology, SchedulerPolicy, StepBudget
from shared.request.sampling_params import SamplingOptions
from shared.step.step import StepKind
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.engine_driver import EngineDriver, attached, expected_scores, worker_facts

AS_PROPOSED = SchedulerPolicy(max_num_seqs=12, max_num_batched_tokens=None, enable_mixed_steps=None)
NUM_DECODES = 8
LONG_PROMPTS = ([(17 + 13 * index) % 1000 for index in range(300)], [(5 + 29 * index) % 1000 for index in range(190)])


def on_cpu(policy: SchedulerPolicy = AS_PROPOSED, *, num_prompt_tokens: int = 32, **cell: object) -> EngineDriver:
    """A cell whose ranks propose what a CPU does, with fewer tokens."""
    driver = EngineDriver(policy=policy, attach=False, **cell)  # type: ignore[arg-type]
    for domain in range(driver.topology.num_domains):
        driver.attach(domain, proposed_prompt_tokens=num_prompt_tokens, proposes_mixed_steps=True)
    return driver


def short_prompt(handle: int) -> list[int]:
    return [handle, 2 * handle, 7 * handle + 1]


def num_prompt_tokens(batch: ScheduledBatch) -> int:
    """The prompt tokens that a step computes."""
    return sum(chunk.num_tokens for chunk in [*batch.chunks, *(enter.chunk for enter in batch.enters)])


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_decoding_sequences_get_a_token_in_every_step_while_long_prompts_are_computed(
    depth: int, num_draft_tokens: int
) -> None:
    driver = on_cpu(depth=depth, num_draft_tokens=num_draft_tokens, num_blocks=256)
    handles = range(1, 1 + NUM_DECODES)
    for handle in handles:
        driver.submit(handle, short_prompt(handle), max_tokens=300)
    while len(driver.choices) < NUM_DECODES:
        driver.step()
    for handle, prompt in enumerate(LONG_PROMPTS, 100):
        driver.submit(handle, prompt, max_tokens=2, options=SamplingOptions(num_prompt_logprobs=1))
    while driver.sent[0].batch.kind is StepKind.DECODE:
        # Steps sent before the prompts arrived.
        driver.step()
    num_steps = 0
    while driver.sent[0].batch.kind is StepKind.MIXED:
        batch = driver.sent[0].batch
        before = [len(driver.choices[1, handle].tokens) for handle in handles]
        assert len(batch.decode_slots) >= NUM_DECODES
        # Decodes take nothing from the prompts' budget: every step but the last uses all of it.
        assert num_prompt_tokens(batch) == min(32, sum(map(len, LONG_PROMPTS)) - 32 * num_steps)
        driver.step()
        assert all(len(driver.choices[1, handle].tokens) > old for handle, old in zip(handles, before, strict=True))
        num_steps += 1
    assert num_steps == -(-sum(map(len, LONG_PROMPTS)) // 32)
    driver.run()
    for handle, prompt in enumerate(LONG_PROMPTS, 100):
        assert driver.choices[1, handle].tokens == expected_completion(prompt, 0, 2)
        assert driver.choices[1, handle].prompt_scores == expected_scores(prompt[1:], 1, start=1, offset=1)
    assert driver.choices[1, 1].tokens == expected_completion(short_prompt(1), 0, 300)


def test_on_coupled_ranks_decodes_continue_beside_long_prompts_of_either_rank() -> None:
    policy = replace(AS_PROPOSED, max_prefill_wait_steps=0)
    driver = on_cpu(policy, topology=CellTopology(2, is_coupled=True))
    driver.submit(1, short_prompt(1), max_tokens=60)
    driver.submit(2, short_prompt(2), max_tokens=60)
    run_together(driver)
    driver.submit(3, LONG_PROMPTS[0], max_tokens=2)
    run_together(driver)
    steps = [run_together(driver) for _ in range(10)]
    for step in steps:
        assert sorted(one.batch.kind.value for one in step) == ["decode", "mixed"]
        assert sorted(num_prompt_tokens(one.batch) for one in step)[1] in (32, 300 % 32)
        assert [len(one.batch.decode_slots) for one in step] == [1, 1]
        assert {one.num_tokens_across_dp for one in step} == {tuple(one.batch.num_tokens for one in step)}
    driver.run()
    assert driver.choices[1, 3].tokens == expected_completion(LONG_PROMPTS[0], 0, 2)


def run_together(driver: EngineDriver) -> list[Step]:
    """Run the oldest step on all ranks; returns it, by rank."""
    steps = [sent[0] for sent in driver.sent_to.values()]
    for rank in driver.sent_to:
        driver.step(rank)
    return steps


def test_each_rank_uses_its_own_workers_proposal() -> None:
    driver = EngineDriver(policy=AS_PROPOSED, attach=False, topology=CellTopology(2))
    driver.attach(0, proposed_prompt_tokens=32, proposes_mixed_steps=True)
    driver.attach(1, proposed_prompt_tokens=100, proposes_mixed_steps=False)
    for handle in (1, 2):
        driver.submit(handle, short_prompt(handle), max_tokens=60)
    for handle, prompt in enumerate(LONG_PROMPTS, 3):
        driver.submit(handle, prompt, max_tokens=2)
    for rank in (0, 1):
        driver.step(rank)
    shapes = [(sent[0].batch.kind, num_prompt_tokens(sent[0].batch)) for sent in driver.sent_to.values()]
    assert shapes == [(StepKind.MIXED, 32), (StepKind.PREFILL, 100)]


@pytest.mark.parametrize(
    ("policy", "budget"),
    [
        (AS_PROPOSED, StepBudget(512 + 12, 512, mixes=True)),
        (SchedulerPolicy(max_num_seqs=12, max_num_batched_tokens=40), StepBudget(40, 40, mixes=False)),
        (
            SchedulerPolicy(max_num_seqs=12, max_num_batched_tokens=40, enable_mixed_steps=None),
            StepBudget(40, 40, mixes=True),
        ),
        (SchedulerPolicy(max_num_seqs=12, max_num_batched_tokens=None), StepBudget(524, 512, mixes=False)),
        (
            SchedulerPolicy(max_num_batched_tokens=600, enable_mixed_steps=None, enable_chunked_prefill=False),
            StepBudget(600, 600, mixes=False),
        ),
    ],
)
def test_settings_override_the_workers_proposal(policy: SchedulerPolicy, budget: StepBudget) -> None:
    facts = replace(worker_facts(), proposed_prompt_tokens=512, proposes_mixed_steps=True)
    assert StepBudget.of(policy, facts) == budget


def test_decodes_leave_prompts_the_proposed_budget_or_the_rest_of_the_set_one() -> None:
    assert StepBudget(512 + 12, 512, mixes=True).prompt_tokens_beside(12) == 512
    assert StepBudget(40, 40, mixes=True).prompt_tokens_beside(12) == 28


def test_without_chunked_prefill_a_proposal_below_the_context_is_refused_at_attach() -> None:
    policy = SchedulerPolicy(max_num_batched_tokens=None, enable_mixed_steps=None, enable_chunked_prefill=False)
    driver = EngineDriver(policy=policy, attach=False)
    [exit_] = driver.on_event(attached(worker_facts(context_length=16385)))
    assert isinstance(exit_, Exit)
