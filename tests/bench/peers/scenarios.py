"""The loads on a scheduler, the same for ours and its peers, with every token checked."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.bench.parts.tokens import VOCABULARY, expected_tokens
from tests.bench.peers.contestant import Contestant, Request, Sizes, StepTokens

MakeContestant = Callable[[Sizes], Contestant]
Figures = dict[str, float]
Prompt = npt.NDArray[np.int32]

NUM_WARM_UP_STEPS = 32
# Before each repeat: other processes have just used the core and its caches, and the first four steps after a peer's
# turn take two to four times as long as the others.
NUM_REWARM_STEPS = 8
# Prompts of one load differ in length by up to a block, so that blocks fill up evenly over the steps.
SPREAD = 16
PAGE_BYTES = 4096


class Load:
    """A contestant with its requests, and the tokens that each has received."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        self.random = np.random.default_rng(0)
        self._num_requests = 0
        self._num_running = 0
        # The number of tokens that each request has received, by key; longer than needed.
        self._num_told = np.zeros(1024, np.int64)

    def make_request(self, prompt: Prompt, max_tokens: int) -> Request:
        """Make the next request."""
        request = Request(self._num_requests, prompt, max_tokens)
        self._num_requests += 1
        if self._num_requests == len(self._num_told):
            self._num_told = np.concatenate([self._num_told, np.zeros_like(self._num_told)])
        return request

    def random_prompt(self, num_tokens: int) -> Prompt:
        """Draw a prompt that shares no prefix with any other."""
        return self.random.integers(3, VOCABULARY, num_tokens, np.int32)

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit requests made by `make_request`."""
        self._num_running += len(requests)
        self.contestant.submit(requests)

    def step(self) -> StepTokens:
        """Run one step, and check every token."""
        told = self.contestant.step()
        assert len(np.unique(told.keys)) == len(told.keys), "a request got two tokens"
        wrong = told.tokens != expected_tokens(told.keys, self._num_told[told.keys])
        assert not wrong.any(), f"request {told.keys[wrong][0]} got a wrong token"
        self._num_told[told.keys] += 1
        self._num_running -= len(told.ended)
        return told

    def run_until_started(self, keys: Sequence[int]) -> None:
        """Run steps until each of these requests has a token."""
        while not self._num_told[np.array(keys)].all():
            self.step()

    def run_until_empty(self) -> None:
        """Run steps until no request is left."""
        while self._num_running:
            self.step()

    def measure_us(self, action: Callable[[], object]) -> float:
        """The contestant's processor time for `action`, in µs."""
        before = self.contestant.stopwatch.seconds
        action()
        return (self.contestant.stopwatch.seconds - before) * 1e6


def fill(load: Load, num_seqs: int, num_prompt_tokens: int, *, max_tokens: int) -> None:
    """Submit requests and run steps until all of them decode, past their first block."""
    requests = [
        load.make_request(load.random_prompt(num_prompt_tokens + number % SPREAD), max_tokens)
        for number in range(num_seqs)
    ]
    load.submit(requests)
    load.run_until_started([request.key for request in requests])
    for _ in range(NUM_WARM_UP_STEPS):
        load.step()


class Decode:
    """`num_seqs` decoding requests, without arrivals or ends."""

    def __init__(self, make: MakeContestant, *, num_seqs: int, block_size: int, num_prompt_tokens: int,
                 num_steps: int, num_repeats: int) -> None:  # fmt: skip
        num_output_tokens = NUM_WARM_UP_STEPS + (NUM_REWARM_STEPS + num_steps) * (num_repeats + 1) + 16
        num_tokens = num_prompt_tokens + SPREAD + num_output_tokens
        self._num_steps = num_steps
        self._load = Load(make(Sizes(num_seqs, block_size, num_seqs * (num_tokens // block_size + 2))))
        self._load.contestant.settle()
        fill(self._load, num_seqs, num_prompt_tokens, max_tokens=num_output_tokens)
        self._num_seqs = num_seqs

    def run(self) -> Figures:
        """Run one repeat; returns the mean per step."""
        for _ in range(NUM_REWARM_STEPS):
            self._load.step()
        return {"step_us": self._load.measure_us(self._run_steps) / self._num_steps}

    def _run_steps(self) -> None:
        for _ in range(self._num_steps):
            assert len(self._load.step().keys) == self._num_seqs, "a step without a token for every request"


class Churn:
    """`num_seqs` decoding and `num_waiting` waiting requests of random lengths; each that ends is replaced."""

    def __init__(self, make: MakeContestant, *, num_seqs: int, block_size: int, num_prompt_tokens: int,
                 mean_output_tokens: int, num_steps: int, num_waiting: int = 0) -> None:  # fmt: skip
        self._mean = mean_output_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._num_steps = num_steps
        self._num_tokens = 0
        num_tokens = num_prompt_tokens + SPREAD + 2 * mean_output_tokens
        self._load = Load(make(Sizes(num_seqs, block_size, num_seqs * (num_tokens // block_size + 2))))
        self._load.contestant.settle()
        first = [self._new_request(self._load.random.uniform()) for _ in range(num_seqs)]
        self._load.submit(first)
        self._load.submit([self._new_request() for _ in range(num_waiting)])
        self._load.run_until_started([request.key for request in first])
        # After this the initial requests have ended and the cache is full.
        for _ in range(2 * mean_output_tokens):
            self._step()

    def run(self) -> Figures:
        """Run one repeat; returns the mean over steps of any kind, and the cost of 512 tokens."""
        self._num_tokens = 0
        us = self._load.measure_us(self._run_steps)
        return {"step_us": us / self._num_steps, "tokens_512_us": us * 512 / self._num_tokens}

    def _run_steps(self) -> None:
        for _ in range(self._num_steps):
            self._step()

    def _step(self) -> None:
        told = self._load.step()
        self._num_tokens += len(told.keys)
        if told.ended:
            self._load.submit([self._new_request() for _ in told.ended])

    def _new_request(self, share_left: float = 1.0) -> Request:
        num_tokens = self._num_prompt_tokens + int(self._load.random.integers(SPREAD))
        max_tokens = int(self._load.random.integers(1, 2 * self._mean))
        return self._load.make_request(self._load.random_prompt(num_tokens), max(2, int(max_tokens * share_left)))


class Admission:
    """One prompt at a time, from submission to first token: when new, and when repeated."""

    def __init__(self, make: MakeContestant, *, num_prompt_tokens: int, block_size: int, num_prompts: int,
                 num_repeats: int) -> None:  # fmt: skip
        self._num_prompt_tokens = num_prompt_tokens
        self._num_prompts = num_prompts
        # Large enough that no cached block is evicted before its prompt is repeated.
        num_blocks = (num_repeats + 2) * (num_prompts + 1) * (num_prompt_tokens // block_size + 4)
        self._load = Load(make(Sizes(16, block_size, num_blocks)))
        self._load.contestant.settle()
        self.run()

    def run(self) -> Figures:
        """Run one repeat; returns the mean over `num_prompts` prompts."""
        prompts = [self._load.random_prompt(self._num_prompt_tokens) for _ in range(self._num_prompts)]
        # Warm up: other processes have just used the core and its caches.
        self._admit(self._load.random_prompt(self._num_prompt_tokens))
        cold_us = sum(map(self._admit, prompts)) / len(prompts)
        cached_us = sum(map(self._admit, prompts)) / len(prompts)
        return {"cold_us": cold_us, "cached_us": cached_us}

    def _admit(self, prompt: Prompt) -> float:
        request = self._load.make_request(prompt, 2)

        def admit() -> None:
            self._load.submit([request])
            self._load.run_until_started([request.key])

        us = self._load.measure_us(admit)
        self._load.run_until_empty()
        return us


class Memory:
    """The memory of `num_seqs` decoding requests with long prompts."""

    def __init__(self, make: MakeContestant, *, num_seqs: int, num_prompt_tokens: int, block_size: int,
                 trace: bool) -> None:  # fmt: skip
        self._num_seqs = num_seqs
        self._num_prompt_tokens = num_prompt_tokens
        self._trace = trace
        # The first one must still decode when the last one arrives.
        self._max_tokens = 4 * num_seqs
        num_blocks = num_seqs * ((num_prompt_tokens + self._max_tokens) // block_size + 2)
        self._load = Load(make(Sizes(num_seqs, block_size, num_blocks)))
        # Memory allocated once at the first request is not counted.
        self._admit(1)
        self._load.run_until_empty()
        self._load.contestant.settle()

    def run(self) -> Figures:
        """Bytes per request: Python allocations if traced, else resident memory."""
        if self._trace:
            tracemalloc.start()
        before = self._used_bytes()
        self._admit(self._num_seqs)
        gc.collect()
        used = self._used_bytes() - before
        tracemalloc.stop()
        return {"bytes_per_seq": used / self._num_seqs}

    def _admit(self, count: int) -> None:
        # One by one, since the temporary memory of one large message would count as resident.
        for _ in range(count):
            request = self._load.make_request(self._load.random_prompt(self._num_prompt_tokens), self._max_tokens)
            self._load.submit([request])
            self._load.run_until_started([request.key])

    def _used_bytes(self) -> int:
        if self._trace:
            return tracemalloc.get_traced_memory()[0]
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES
