"""Waiting queues, and sequences to put in them."""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.core.batch.sequence import Priority, Sequence
from services.scheduler.core.queue.waiting_queue import QueuePolicy, WaitingQueue
from shared.ids import RequestHandle
from shared.request.sampling_params import SamplingParams
from tests.support.scheduler.engine_driver import token_bytes

MAX_AGE_S = 10.0


def make_queue(policy: QueuePolicy = QueuePolicy.FCFS) -> WaitingQueue:
    """An empty queue in which requests age after `MAX_AGE_S`."""
    return WaitingQueue(policy, MAX_AGE_S)


def make_seq(
    arrived_at: float = 0.0, *, priority: Priority = Priority.NORMAL, num_prompt_tokens: int = 1, attempt: int = 1
) -> Sequence:
    """A sequence that was never admitted."""
    return Sequence(
        id="",
        client=1,
        handle=RequestHandle(1),
        params=SamplingParams(max_tokens=1),
        token_bytes=bytearray(token_bytes([1] * num_prompt_tokens)),
        num_prompt_tokens=num_prompt_tokens,
        arrived_at=arrived_at,
        priority=priority,
        attempt=attempt,
    )


def add_all(queue: WaitingQueue, *seqs: Sequence) -> None:
    """Add each sequence at its arrival time."""
    for seq in seqs:
        queue.add(seq, seq.arrived_at)


def nothing_cached(_: Sequence) -> int:
    """An empty prefix cache."""
    return 0


class CacheQueries:
    """An empty prefix cache that records the sequences for which it was queried."""

    def __init__(self) -> None:
        self.seqs: list[Sequence] = []

    def __call__(self, seq: Sequence) -> int:
        """Record the query; no token is cached."""
        self.seqs.append(seq)
        return 0


def take_next(
    queue: WaitingQueue, now: float, num_cached_tokens: Callable[[Sequence], int] = nothing_cached
) -> Sequence:
    """Admit the next sequence."""
    seq = queue.next(now, num_cached_tokens)
    queue.take(seq, now)
    seq.num_first_cached_tokens = 0
    queue.check_integrity()
    return seq


def drain(
    queue: WaitingQueue, now: float, num_cached_tokens: Callable[[Sequence], int] = nothing_cached
) -> list[Sequence]:
    """Admit all waiting sequences at once."""
    return [take_next(queue, now, num_cached_tokens) for _ in range(len(queue))]
