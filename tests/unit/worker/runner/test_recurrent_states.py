"""A runner's recurrent states: cleared, continued, saved, restored, and kept from other sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.worker.models.loader import LoadedModel, load_model
from services.worker.ops import load_ops
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.model_runner import ModelRunner
from shared.errors import StepMismatchError
from shared.step.step import Step
from tests.support.models.parity import make_prompts
from tests.support.models.small_models import build_small_model, write_small_model
from tests.support.worker.worker_driver import Request, WorkerDriver
from tests.support.worker.worker_runner import generate_alone, load_exact, make_runner
from tests.support.worker.worker_steps import decode_step, make_chunk, make_enter, mixed_step, prefill_step, with_pairs

PROMPTS = make_prompts((24, 3, 17))
NUM_TOKENS = 6
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    model = build_small_model("Qwen3NextForCausalLM", "layer-types-tied-biases")
    return load_exact(write_small_model(model, tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> list[list[int]]:
    """What each prompt continues with."""
    return [generate_alone(loaded, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.fixture
def runner(loaded: LoadedModel) -> ModelRunner:
    runner = make_runner(loaded)
    runner.attach(block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=256)
    return runner


def tokens_of(runner: ModelRunner, *steps: Step) -> list[list[int]]:
    return [runner.run_step(step).token_ids.tolist() for step in steps]


@pytest.mark.parametrize("seed", range(3))
def test_chunks_batches_and_skipped_rows_change_no_token(
    loaded: LoadedModel, expected: list[list[int]], seed: int
) -> None:
    driver = WorkerDriver(make_runner(loaded), seed=seed, max_chunk=(3, 9, 32)[seed])
    # Slots are used again by later sequences.
    answers = driver.generate([Request(prompt, NUM_TOKENS) for prompt in PROMPTS * 3])
    assert [answer.tokens for answer in answers] == expected * 3


def test_a_preempted_sequence_begins_anew_in_its_old_slot(runner: ModelRunner, expected: list[list[int]]) -> None:
    before = tokens_of(runner, prefill_step(make_enter(3, PROMPTS[0], range(8))), decode_step())
    again = make_enter(3, [*PROMPTS[0], *before[0], *before[1]], range(8, 16))
    after = tokens_of(runner, prefill_step(again, leave=[3]), decode_step())
    assert [token for [token] in before + after] == expected[0][:4]


def test_a_saved_state_continues_a_prefix(runner: ModelRunner, expected: list[list[int]]) -> None:
    prompt, cached = PROMPTS[0], 8
    first = make_enter(0, prompt[:cached], range(8), num_later_tokens=len(prompt) - cached)
    assert tokens_of(runner, with_pairs(prefill_step(first), saves=[(0, 5)])) == [[]]
    # The slot goes on, which changes nothing in what was saved.
    rest = tokens_of(runner, prefill_step(chunks=[make_chunk(0, prompt[cached:])]), decode_step())
    second = make_enter(2, prompt[cached:], [0, 1, *range(20, 28)], num_cached_tokens=cached)
    third = make_enter(4, prompt[cached:], [0, 1, *range(30, 38)], num_cached_tokens=cached)
    restored = with_pairs(prefill_step(second, third), restores=[(2, 5), (4, 5)])
    assert tokens_of(runner, restored, decode_step(rows=[2, 4])) == [[token] * 2 for [token] in rest]
    assert [token for [token] in rest] == expected[0][:2]


def test_a_decode_saves_the_state_after_its_token(runner: ModelRunner, expected: list[list[int]]) -> None:
    prompt = PROMPTS[2]
    tokens_of(runner, prefill_step(make_enter(1, prompt, range(8))))
    # The token that the decode computes is the first one drawn: 18 in all, of which blocks hold 16.
    for number in range(3):
        tokens_of(runner, with_pairs(decode_step(), saves=[(1, number)]))
    known = [*prompt, *expected[2][:3]]
    again = make_enter(6, [expected[2][3]], [*range(5), 9], num_cached_tokens=len(known))
    restored = with_pairs(prefill_step(again), restores=[(6, 2)])
    assert tokens_of(runner, restored) == [[expected[2][4]]]


def test_nothing_that_a_slot_held_reaches_the_next_sequence(runner: ModelRunner, expected: list[list[int]]) -> None:
    """Elsewhere, the NaN of an ended sequence stayed in its slot, and spoilt all later ones of the slot."""
    states = runner._epochs.states
    assert states is not None
    for layer in states.layers:
        for tensor in layer:
            tensor.fill_(torch.nan)
    rows = [make_enter(slot, prompt, range(8 * slot, 8 * slot + 8)) for slot, prompt in enumerate(PROMPTS)]
    steps = tokens_of(runner, prefill_step(*rows), *[decode_step()] * (NUM_TOKENS - 1))
    assert [list(row) for row in zip(*steps, strict=True)] == expected


def test_states_of_a_bfloat16_model_are_never_rounded_to_it(loaded: LoadedModel) -> None:
    """Elsewhere, they were, so that two forms of the recurrence agreed."""
    ops = load_ops("reference")
    half = load_model(Path(loaded.model_dir), ops, torch.bfloat16, lambda _: None)
    runner = ModelRunner(half, ops, KvCacheSize(1 << 30, 64))
    runner.attach(block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=256)
    states = runner._epochs.states
    assert states is not None
    deltas = [layer[1] for layer in states.layers if layer]
    prompt, cached = PROMPTS[0], 8
    first = make_enter(0, prompt[:cached], range(8), num_later_tokens=len(prompt) - cached)
    runner.run_step(with_pairs(prefill_step(first), saves=[(0, 5)]))
    second = make_enter(2, prompt[cached:], [0, 1, *range(20, 28)], num_cached_tokens=cached)
    rest = prefill_step(second, chunks=[make_chunk(0, prompt[cached:])])
    runner.run_step(with_pairs(rest, restores=[(2, 5)]))
    for delta in deltas:
        assert torch.equal(delta[0], delta[2])
        assert not torch.equal(delta[0], delta[0].bfloat16().float())


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_state_that_is_not_finite_ends_its_row_alone_and_is_reported_when_saved(
    runner: ModelRunner, expected: list[list[int]], value: float
) -> None:
    rows = [make_enter(slot, prompt, range(8 * slot, 8 * slot + 8)) for slot, prompt in enumerate(PROMPTS)]
    tokens_of(runner, prefill_step(*rows))
    states = runner._epochs.states
    assert states is not None
    recurrent = next(layer for layer in states.layers if layer)
    recurrent[1][1, 0, 0, 0] = value
    result = runner.run_step(with_pairs(decode_step(), saves=[(0, 3), (1, 4), (2, 5)]))
    assert result.not_finite_rows.tolist() == [1]
    assert result.not_finite_saves.tolist() == [1]
    assert [result.token_ids[row] for row in (0, 2)] == [expected[row][1] for row in (0, 2)]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (prefill_step(make_enter(1, [5, 6], [0, 1], num_cached_tokens=4)), "state_restores are not those"),
        (with_pairs(prefill_step(make_enter(1, [5, 6], [0, 1])), restores=[(1, 0)]), "state_restores are not those"),
        (with_pairs(prefill_step(make_enter(1, [5, 6], [0, 1])), saves=[(2, 0)]), "a sequence that is not in the step"),
        (with_pairs(prefill_step(make_enter(1, [5, 6], [0, 1])), saves=[(1, 16)]), "a checkpoint is out of range"),
        (with_pairs(prefill_step(make_enter(1, [5, 6], [0, 1])), saves=[(1, -1)]), "a checkpoint is out of range"),
        (with_pairs(prefill_step(make_enter(1, [5], [0])), saves=[(1, 3), (1, 3)]), "two states are saved in one"),
    ],
)
def test_a_step_whose_states_do_not_fit_is_refused(runner: ModelRunner, step: Step, message: str) -> None:
    with pytest.raises(StepMismatchError, match=message):
        runner.run_step(step)


def test_states_take_their_memory_before_keys_and_values(loaded: LoadedModel) -> None:
    state_bytes = loaded.model.state_spec.bytes_per_slot
    block_bytes = BLOCK_SIZE * loaded.model.kv_cache_spec.bytes_per_token
    for memory_bytes, room in (
        (2 * state_bytes + block_bytes - 1, (0, 0, 0)),
        (2 * state_bytes + 3 * block_bytes, (3, 1, 0)),
        (10 * state_bytes, (5 * state_bytes // block_bytes, 4, 0)),
    ):
        runner = ModelRunner(loaded, load_ops("reference"), KvCacheSize(memory_bytes))
        attached = runner.attach(block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=64)
        assert (attached, runner.room) == (room[0], room)
    # The first slots have states.
    assert len(tokens_of(runner, prefill_step(make_enter(3, [7, 8], [0])))[0]) == 1
    with pytest.raises(StepMismatchError, match="a slot has no state"):
        runner.run_step(prefill_step(make_enter(4, [7, 8], [1])))


def test_prompts_beside_decodes_leave_their_states_alone(runner: ModelRunner, expected: list[list[int]]) -> None:
    tokens_of(runner, prefill_step(make_enter(7, PROMPTS[0], range(8))))
    first = make_enter(2, PROMPTS[2][:5], range(8, 16), num_later_tokens=12)
    steps = [mixed_step(first), mixed_step(chunks=[make_chunk(2, PROMPTS[2][5:])])]
    assert tokens_of(runner, *steps) == [[expected[0][1]], [expected[0][2], expected[2][0]]]
