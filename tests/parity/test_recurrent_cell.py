"""A real scheduler over a real runner of Qwen3-Next on `reference`: disturbances change no bit of any answer.

The faults of others that this would show: a prefix hit whose state was never saved, a state that began anew at a chunk,
a slot that was not cleared, and a state that was rounded on its way to a checkpoint or back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest

from services.scheduler.core.policy import SchedulerPolicy
from services.worker.models.loader import LoadedModel
from services.worker.runner.model_runner import ModelRunner
from shared.request.sampling_params import SamplingOptions
from tests.support.models.parity import SmallModels, make_prompts
from tests.support.scheduler.engine_driver import ChoiceOutput
from tests.support.scheduler.runner_cell import RunnerDriver
from tests.support.worker.worker_runner import load_exact, make_runner

BLOCK_SIZE = 4
CONTEXT_LENGTH = 128
NUM_TOKENS = 7
# The log-probabilities cover most of a row's logits, so they show differences in single bits.
SCORED = SamplingOptions(num_logprobs=20)
[COMMON] = make_prompts((21,), seed=3)
NUM_REQUESTS = 8
# Blocks for all sequences, and for so few that some are preempted.
LARGE, SMALL = 64, 18


@dataclass(frozen=True)
class Ask:
    """A request: its prompt, and how it is drawn."""

    prompt: list[int]
    temperature: float
    seed: int


def make_asks() -> Iterator[Ask]:
    """Requests that share prefixes of several lengths, whole blocks and not."""
    rng = Random(4)
    for number, tail in enumerate(make_prompts((5, 1, 9, 14, 3, 2, 30, 6), seed=5)):
        shared = rng.choice([0, 8, 11, 16, 20, 21])
        yield Ask([*COMMON[:shared], *tail], temperature=0.8 * (number % 2), seed=number)


ASKS = list(make_asks())
assert len(ASKS) == NUM_REQUESTS


@pytest.fixture(scope="module")
def loaded(small_models: SmallModels) -> LoadedModel:
    return load_exact(small_models.get("Qwen3NextForCausalLM", "layer-types-tied-biases").directory)


@pytest.fixture(scope="module")
def runner(loaded: LoadedModel) -> ModelRunner:
    return make_runner(loaded, num_blocks=128)


def submit(driver: RunnerDriver, number: int) -> None:
    ask = ASKS[number]
    driver.submit(number, ask.prompt, max_tokens=NUM_TOKENS, temperature=ask.temperature, seed=ask.seed, options=SCORED)


def answer_of(driver: RunnerDriver, number: int) -> tuple[list[int], object]:
    choice: ChoiceOutput = driver.choices[1, number]
    assert choice.end is not None
    assert choice.end.error is None
    return choice.tokens, choice.scores


@pytest.fixture(scope="module")
def undisturbed(runner: ModelRunner) -> list[tuple[list[int], object]]:
    """Each answer alone, its prompt in one step, without a cache."""
    driver = RunnerDriver(
        runner,
        num_blocks=128,
        block_size=BLOCK_SIZE,
        context_length=CONTEXT_LENGTH,
        policy=SchedulerPolicy(max_num_seqs=4),
        enable_prefix_caching=False,
        num_checkpoint_slots=0,
    )
    for number in range(NUM_REQUESTS):
        submit(driver, number)
        driver.run()
    return [answer_of(driver, number) for number in range(NUM_REQUESTS)]


@pytest.mark.parametrize(
    ("num_checkpoint_slots", "interval", "num_blocks"),
    [
        # Without checkpoints, so that all prefixes are computed again.
        (0, 0, SMALL),
        (16, 0, LARGE),
        # Checkpoints are evicted, and sequences preempted.
        (2, 8, SMALL),
        pytest.param(16, 1, SMALL, marks=pytest.mark.slow),
    ],
)
def test_hits_preemptions_and_lost_workers_change_no_bit(
    runner: ModelRunner,
    undisturbed: list[tuple[list[int], object]],
    num_checkpoint_slots: int,
    interval: int,
    num_blocks: int,
) -> None:
    rng = Random(num_checkpoint_slots + interval)
    driver = RunnerDriver(
        runner,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        context_length=CONTEXT_LENGTH,
        policy=SchedulerPolicy(max_num_seqs=4, max_num_batched_tokens=13),
        depth=2,
        num_checkpoint_slots=num_checkpoint_slots,
        state_checkpoint_interval=interval,
    )
    for turn in range(2):
        # The second turn asks for what the first one has cached.
        for number in rng.sample(range(NUM_REQUESTS), NUM_REQUESTS):
            driver.choices.pop((1, number), None)
            submit(driver, number)
            for _ in range(rng.randrange(4)):
                if driver.sent:
                    driver.step()
        # All that was saved is lost with the worker.
        if not turn:
            driver.lose()
            driver.attach()
        driver.run()
        assert [answer_of(driver, number) for number in range(NUM_REQUESTS)] == undisturbed
    counters = driver.engine.state().counters
    assert bool(counters.num_prefix_hit_tokens) == bool(num_checkpoint_slots)
    # At a loss, running sequences count as preempted too.
    assert num_blocks == LARGE or counters.num_preemptions > counters.num_suspect_trials
