"""Experts spread over the ranks of a cell, each a process: on `reference` this changes no byte of any result.

TP groups of one size give the same bytes in every layout of the cell. Every rank runs fixed steps twice: coupled, with
the experts spread over all ranks, and in a group that has all experts. While only other ranks have work, a coupled rank
runs a dummy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.internal.v1 import worker_pb2
from services.worker.layout import RankLayout
from shared.request.sampling_params import SamplingOptions
from shared.step.step import EnteringSequence, Step, StepKind
from tests.support.models.parity import SmallModels, make_prompts
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.ranks.step_pool import StepPool
from tests.support.ranks.step_process import StepAnswer
from tests.support.system.processes import WITHOUT_COMPILER
from tests.support.worker.worker_steps import decode_step, make_chunk, make_enter, mixed_step, prefill_step, with_params

FAMILIES = (
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
    "Glm4MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "Glm4vMoeForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3NextForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
PROMPTS = make_prompts((23, 5, 40, 33), seed=8)
# The log-probabilities cover most of a row's logits, so they show differences in single bits.
SCORED = SamplingOptions(num_logprobs=20)


@pytest.fixture(scope="module")
def pool() -> Iterator[StepPool]:
    pool = StepPool()
    yield pool
    pool.close()


def enter(slot: int, prompt: list[int], *, num_later_tokens: int = 0) -> EnteringSequence:
    """A sequence with requested log-probabilities; its blocks follow from its slot."""
    blocks = range(10 * slot, 10 * slot + 10)
    return make_enter(slot, prompt, blocks, num_later_tokens=num_later_tokens, options=SCORED)


def script() -> list[list[Step | None]]:
    """The steps of two ranks, independent of results; None means that the rank has nothing to compute."""
    first, second, third, fourth = PROMPTS
    drawn = with_params(enter(1, second), temperature=0.9, seed=5)
    both: Step | None = decode_step()
    # A resumed sequence with three arbitrary completion tokens.
    back = replace(enter(3, fourth), num_prompt_tokens=len(fourth) - 3)
    return [
        [prefill_step(enter(0, first), drawn), None],
        [both, prefill_step(enter(2, third[:25], num_later_tokens=15))],
        [both, prefill_step(chunks=[make_chunk(2, third[25:])])],
        *[[both, both]] * 3,
        [decode_step(leave=[0]), both],
        [None, mixed_step(enter(0, second))],
        [prefill_step(back, leave=[1]), both],
        [both, None],
        [both, decode_step(leave=[0])],
    ]


def num_tokens_of(rank_steps: list[Step | None]) -> list[int]:
    """The number of tokens that a rank computes in each step, counting 1 for a dummy."""
    counts, complete = [], set[int]()
    for step in rank_steps:
        if step is None:
            counts.append(1)
            continue
        complete -= set(step.leave_slots.tolist())
        num_decodes = 0 if step.kind is StepKind.PREFILL else len(complete)
        counts.append(num_decodes + len(step.chunks.token_ids))
        complete |= set(step.chunks.slots[step.chunks.num_later_tokens == 0].tolist())
    return counts


def coupled(steps: list[list[Step | None]]) -> list[list[Step]]:
    """The steps as sent to coupled ranks: with the token counts of all ranks, and dummies for idle ones."""
    by_rank = [list(rank_steps) for rank_steps in zip(*steps, strict=True)]
    across = list(zip(*map(num_tokens_of, by_rank), strict=True))
    are_eager = [any(step is not None and step.kind is not StepKind.DECODE for step in row) for row in steps]

    def send(step: Step | None, number: int) -> Step:
        kind = StepKind.PREFILL if are_eager[number] else StepKind.DECODE
        sent = replace(decode_step(), is_dummy=True, kind=kind) if step is None else step
        return replace(sent, num_tokens_across_dp=across[number])

    return [[send(step, number) for number, step in enumerate(rank_steps)] for rank_steps in by_rank]


def layouts(dp_size: int, tp_size: int, *, has_expert_parallel: bool) -> list[RankLayout]:
    return [
        RankLayout(dp_rank, dp_size, tp_rank, tp_size, has_expert_parallel=has_expert_parallel)
        for dp_rank in range(dp_size)
        for tp_rank in range(tp_size)
    ]


def results_of(answer: StepAnswer) -> list[worker_pb2.StepResult]:
    return [worker_pb2.StepResult.FromString(bytes.fromhex(result)) for result in answer.results]


def check_ep_changes_no_byte(pool: StepPool, model_dir: Path, dp_size: int, tp_size: int) -> None:
    steps = [row[:dp_size] for row in script() if any(row[:dp_size])]
    by_rank = [[step for step in rank_steps if step is not None] for rank_steps in zip(*steps, strict=True)]
    sent = coupled(steps) if dp_size > 1 else by_rank
    spread = pool.run(model_dir, layouts(dp_size, tp_size, has_expert_parallel=True), sent, backend="reference")
    assert len({answer.fingerprint for answer in spread}) == 1
    for dp_rank in range(dp_size):
        group = layouts(1, tp_size, has_expert_parallel=False)
        alone = pool.run(model_dir, group, [by_rank[dp_rank]], backend="reference")
        assert [answer.fingerprint for answer in alone] == [spread[0].fingerprint] * tp_size
        is_dummy = [step is None for step in (row[dp_rank] for row in steps)]
        for answer in spread[dp_rank * tp_size : (dp_rank + 1) * tp_size]:
            idle = [result for result, dummy in zip(results_of(answer), is_dummy, strict=True) if dummy]
            assert all(not result.token_ids for result in idle)
            computed = [result for result, dummy in zip(answer.results, is_dummy, strict=True) if not dummy]
            assert computed == alone[0].results
            # Progress counts every layer of every step, dummies included, and each step.
            assert answer.progress >= 3 * len(steps)


def cases() -> list[Any]:
    """All cases; `make test` runs each family once and each cell layout once, `make proofs` the others."""
    shapes = [(2, 1), (1, 2), (2, 2)]
    return [
        pytest.param(
            family, dp_size, tp_size, marks=() if shapes[number % 3] == (dp_size, tp_size) else pytest.mark.proof
        )
        for number, family in enumerate(FAMILIES)
        for dp_size, tp_size in shapes
    ]


@pytest.mark.parametrize(("family", "dp_size", "tp_size"), cases())
def test_spreading_experts_changes_no_byte_of_any_result(
    small_models: SmallModels, pool: StepPool, family: str, dp_size: int, tp_size: int
) -> None:
    model_dir = small_models.get(family, next(iter(SMALL_CONFIGS[family]))).directory
    check_ep_changes_no_byte(pool, model_dir, dp_size, tp_size)


def check_same_tokens(pool: StepPool, small_models: SmallModels) -> None:
    """The ranks of a group draw the same tokens on the backend `native`, or on what takes over from it."""
    model_dir = small_models.get("MixtralForCausalLM", next(iter(SMALL_CONFIGS["MixtralForCausalLM"]))).directory
    answers = pool.run(model_dir, layouts(2, 2, has_expert_parallel=True), coupled(script()), backend="native")
    assert answers[0].results == answers[1].results
    assert answers[2].results == answers[3].results


def test_a_fast_backend_draws_the_same_tokens_on_all_ranks_of_a_group(
    pool: StepPool, small_models: SmallModels
) -> None:
    check_same_tokens(pool, small_models)


def test_without_a_compiler_all_ranks_of_a_group_draw_the_same_tokens_too(small_models: SmallModels) -> None:
    with closing(StepPool(WITHOUT_COMPILER)) as pool:
        check_same_tokens(pool, small_models)
