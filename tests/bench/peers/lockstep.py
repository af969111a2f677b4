"""Our engine's process: the scenarios shared with its peers, and its own."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

from services.scheduler.core.queue.waiting_queue import QueuePolicy
from tests.bench.peers.contestant import Sizes
from tests.bench.peers.lockstep_scheduler import LockstepScheduler
from tests.bench.peers.protocol import serve
from tests.bench.peers.scenarios import Admission, Churn, Decode, Figures, Load, Memory, fill

MEAN_OUTPUT_TOKENS = 200
BLOCK_SIZE = 16


class Messages:
    """The sizes of the messages of a decode step, in bytes."""

    def __init__(self, *, num_seqs: int, num_prompt_tokens: int) -> None:
        self._scheduler = LockstepScheduler(
            Sizes(num_seqs, BLOCK_SIZE, num_seqs * (num_prompt_tokens // BLOCK_SIZE + 8))
        )
        self._load = Load(self._scheduler)
        fill(self._load, num_seqs, num_prompt_tokens, max_tokens=5 * BLOCK_SIZE)

    def run(self) -> Figures:
        """The largest of each message over as many steps as a block has tokens."""
        down: list[int] = []
        up: list[int] = []
        for _ in range(BLOCK_SIZE):
            self._load.step()
            down.append(self._scheduler.step_bytes)
            up.append(self._scheduler.result_bytes)
        return {"step_bytes": max(down), "result_bytes": max(up)}


class Collections:
    """Garbage collections while a long queue builds up and requests come and go."""

    def __init__(self, *, num_seqs: int, num_waiting: int, num_prompt_tokens: int, num_steps: int) -> None:
        self._scheduler: LockstepScheduler | None = None
        self._num_full_in_steps = 0
        gc.callbacks.append(self._on_collection)
        self._churn = Churn(
            self._make,
            num_seqs=num_seqs,
            block_size=BLOCK_SIZE,
            num_prompt_tokens=num_prompt_tokens,
            mean_output_tokens=MEAN_OUTPUT_TOKENS,
            num_steps=num_steps,
            num_waiting=num_waiting,
        )

    def run(self) -> Figures:
        """Count the full collections, since the start, that began inside a measured step or submission."""
        self._churn.run()
        gc.callbacks.remove(self._on_collection)
        return {"num_full_in_steps": self._num_full_in_steps}

    def _make(self, sizes: Sizes) -> LockstepScheduler:
        self._scheduler = LockstepScheduler(sizes)
        return self._scheduler

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        is_full = phase == "start" and info["generation"] == 2
        if is_full and self._scheduler is not None and self._scheduler.stopwatch.is_running:
            self._num_full_in_steps += 1


class CachedPool:
    """Admission of 1k prompts into a pool full of cached blocks, so that each new block evicts one."""

    num_prompts = 8
    num_prompt_tokens = 1024
    num_filling_tokens = 4096

    def __init__(self, *, num_cached_blocks: int) -> None:
        self._load = Load(LockstepScheduler(Sizes(BLOCK_SIZE, BLOCK_SIZE, num_cached_blocks)))
        self._load.contestant.settle()
        for _ in range(num_cached_blocks * BLOCK_SIZE // self.num_filling_tokens + 1):
            self._admit(self._load.random_prompt(self.num_filling_tokens))

    def run(self) -> Figures:
        """Mean processor time per prompt."""
        figures = {"cold_us": 0.0, "cached_us": 0.0}
        for _ in range(self.num_prompts):
            prompt = self._load.random_prompt(self.num_prompt_tokens)
            for name in figures:
                figures[name] += self._admit(prompt) / self.num_prompts
        return figures

    def _admit(self, prompt: Any) -> float:
        request = self._load.make_request(prompt, 1)
        us = self._load.measure_us(lambda: self._load.submit([request]))
        return us + self._load.measure_us(self._load.run_until_empty)


class Waiting:
    """The cost of a queue of `num_waiting` requests while 16 decoding sequences hold every slot."""

    num_running = 16
    num_waiting_tokens = 16
    num_actions = 16
    num_steps = 64

    def __init__(self, *, num_waiting: int, queue_policy: str, num_tenants: int = 1) -> None:
        sizes = Sizes(self.num_running, BLOCK_SIZE, self.num_running * 1024)
        self._scheduler = LockstepScheduler(sizes, queue_policy=QueuePolicy(queue_policy), num_tenants=num_tenants)
        self._load = Load(self._scheduler)
        self._scheduler.settle()
        fill(self._load, self.num_running, BLOCK_SIZE, max_tokens=8192)
        self._waiting: list[int] = []
        for _ in range(0, num_waiting, self.num_actions):
            self._submit(min(self.num_actions, num_waiting - len(self._waiting)))

    def run(self) -> Figures:
        """Processor time of a step, of an abort in the middle of the queue, of a submission, and of a turn.

        In a turn a running request is aborted, and a few steps later a waiting one takes its slot.
        """
        measure = self._load.measure_us
        figures = {
            "step_us": measure(self._run_steps) / self.num_steps,
            "abort_us": 0.0,
            "submit_us": 0.0,
            "turn_us": 0.0,
        }
        for _ in range(self.num_actions):
            figures["abort_us"] += measure(self._abort_in_the_middle) / self.num_actions
            figures["submit_us"] += measure(lambda: self._submit(1)) / self.num_actions
        for _ in range(self.num_actions):
            figures["turn_us"] += measure(self._turn) / self.num_actions
            self._submit(1)
        return figures

    def _run_steps(self) -> None:
        for _ in range(self.num_steps):
            self._load.step()

    def _submit(self, count: int) -> None:
        prompts = (self._load.random_prompt(self.num_waiting_tokens) for _ in range(count))
        requests = [self._load.make_request(prompt, 4096) for prompt in prompts]
        self._load.submit(requests)
        self._waiting += [request.key for request in requests]

    def _abort_in_the_middle(self) -> None:
        self._scheduler.abort([self._waiting.pop(len(self._waiting) // 2)])

    def _turn(self) -> None:
        running = set(self._load.step().keys.tolist())
        self._scheduler.abort([next(iter(running))])
        while not (entered := set(self._load.step().keys.tolist()) - running):
            pass
        # With several tenants, it may be one that made way for another and is back.
        self._waiting = [key for key in self._waiting if key not in entered]


if __name__ == "__main__":
    serve({
        "decode": partial(Decode, LockstepScheduler),
        "decode_hybrid": partial(Decode, partial(LockstepScheduler, has_recurrent_state=True)),
        "churn": partial(Churn, LockstepScheduler),
        "admission": partial(Admission, LockstepScheduler),
        "memory": partial(Memory, LockstepScheduler),
        "messages": Messages,
        "collections": Collections,
        "cached_pool": CachedPool,
        "waiting": Waiting,
    })  # fmt: skip
