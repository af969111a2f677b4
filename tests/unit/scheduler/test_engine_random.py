"""The engine under random settings and random events: every request is answered once, and as if it were alone."""

from __future__ import annotations

import random

import numpy as np
import pytest

from services.scheduler.batch import StepResult
from services.scheduler.events import ClientGone, ClientMessage, StepReturned
from services.scheduler.policy import SchedulerPolicy
from services.scheduler.sequence import FinishReason
from tests.support.cell_model import VOCABULARY, expected_completion
from tests.support.engine_driver import EngineDriver

NUM_REQUESTS = 25


class RandomRun:
    """One run, replayed exactly by its seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.mixed = self.rng.random() < 0.3
        block_size = self.rng.choice([1, 16, 32])
        self.driver = EngineDriver(
            num_blocks=self.rng.choice([10, 16, 64]) * 16 // block_size,
            block_size=block_size,
            depth=self.rng.randint(1, 4),
            enable_prefix_caching=self.rng.random() < 0.7,
            policy=SchedulerPolicy(
                max_num_seqs=self.rng.choice([1, 3, 8]),
                max_num_batched_tokens=self.rng.choice([16, 48, 600]),
                delay_factor=self.rng.choice([0.0, 0.0, 1.5]),
                enable_mixed_steps=self.mixed,
            ),
        )
        # By (client, handle): prompt, seed, tokens until it ends by itself.
        self.requests: dict[tuple[int, int], tuple[list[int], int, int]] = {}
        self.stopped: dict[tuple[int, int], int] = {}
        self.forgotten: set[tuple[int, int]] = set()

    def run(self) -> None:
        """Submit, step and disturb until all requests are there, then let them end."""
        for handle in range(NUM_REQUESTS):
            self._submit(handle)
            for _ in range(self.rng.randint(0, 6)):
                self._step()
                self._disturb()
        while self.driver.sent:
            self._step()

    def check(self) -> None:
        """Everything that must hold at the end."""
        for key, (prompt, seed, num_tokens) in self.requests.items():
            told = self.driver.told.get(key)
            expected = expected_completion(prompt, seed, num_tokens)
            if key in self.forgotten:
                assert told is None or told.tokens == expected[: len(told.tokens)]
                continue
            assert told is not None
            assert told.end is not None, "a request that was never answered"
            if told.end.error is not None:
                assert told.end.error.reason == "NUMERIC_ERROR"
            elif told.end.finish is not None and told.end.finish.reason is FinishReason.STOP_STRING:
                assert told.end.num_completion_tokens == self.stopped[key]
            else:
                assert (told.tokens, told.end.num_completion_tokens) == (expected, num_tokens)
            assert told.tokens == expected[: len(told.tokens)]
        state = self.driver.engine.state()
        assert (state.num_used_blocks, state.num_running, state.num_waiting) == (0, 0, 0)

    def _submit(self, handle: int) -> None:
        rng = self.rng
        key = (rng.randint(1, 2), handle)
        start = rng.choice([1, 1, 500])
        prompt = [(start + 7 * index) % VOCABULARY for index in range(rng.choice([1, 15, 16, 17, 40, 90]))]
        max_tokens, seed = rng.randint(1, 60), rng.randint(0, 2)
        expected = expected_completion(prompt, seed, max_tokens)
        stop = rng.choice([(), (expected[rng.randrange(max_tokens)],)])
        num_tokens = expected.index(stop[0]) + 1 if stop else max_tokens
        self.requests[key] = (prompt, seed, num_tokens)
        self.driver.submit(handle, prompt, client=key[0], max_tokens=max_tokens, seed=seed, stop_token_ids=stop)

    def _step(self) -> None:
        if not self.driver.sent:
            return
        if self.rng.random() > 0.02:
            self.driver.step()
            return
        result = self.driver.worker.run(self.driver.sent.pop(0))
        bad = np.flatnonzero([self.rng.random() < 0.3 for _ in result.token_ids]).astype(np.int32)
        self.driver.now += 1.0
        self.driver.on_event(StepReturned(StepResult(1, result.step_id, result.token_ids, bad)))

    def _disturb(self) -> None:
        live = [key for key in self.requests if key not in self.forgotten and not self._has_ended(key)]
        choice = self.rng.random()
        if not live or choice > 0.12:
            return
        client, handle = key = self.rng.choice(live)
        told = self.driver.told.get(key)
        if choice < 0.05:
            self.forgotten.add(key)
            self.driver.on_event(ClientMessage(client, aborts=[handle]))
        elif choice < 0.06:
            self.forgotten |= {other for other in live if other[0] == client}
            self.driver.on_event(ClientGone(client))
        elif told is not None and told.tokens:
            self.stopped[key] = self.rng.randint(1, len(told.tokens))
            self.driver.on_event(ClientMessage(client, stop_ats=[(handle, self.stopped[key])]))

    def _has_ended(self, key: tuple[int, int]) -> bool:
        told = self.driver.told.get(key)
        return told is not None and told.end is not None


def run_seeds(seeds: range) -> None:
    for seed in seeds:
        run = RandomRun(seed)
        try:
            run.run()
            run.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_a_few_seeds() -> None:
    run_seeds(range(40))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(40, 1040, 100))
def test_many_seeds(first: int) -> None:
    run_seeds(range(first, first + 100))
