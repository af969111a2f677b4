"""Drives the real engine against a worker model, and collects what each request is told."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from services.scheduler.batch import RequestEnd, Step, StepResult
from services.scheduler.engine import Engine
from services.scheduler.events import (
    Action,
    ClientMessage,
    Deliver,
    Event,
    SendStep,
    StepReturned,
    Submission,
    WorkerAttached,
    WorkerFacts,
)
from services.scheduler.policy import CacheSettings, SchedulerPolicy
from services.scheduler.sequence import Priority
from services.worker.input_batch import BatchLimits
from shared.limits import TOKEN_DTYPE, SamplingParams
from tests.support.cell_model import VOCABULARY, WorkerModel

EOS = 7


def token_bytes(token_ids: list[int]) -> bytes:
    """Token ids as cells speak them."""
    return np.array(token_ids, TOKEN_DTYPE).tobytes()


def worker_facts(*, num_blocks: int = 64, context_length: int = 512, epoch: int = 1) -> WorkerFacts:
    """A worker's answer to an attach."""
    return WorkerFacts(epoch, "digest", context_length, VOCABULARY, (EOS,), num_blocks)


@dataclass
class Told:
    """What one request was told."""

    tokens: list[int] = field(default_factory=list)
    num_cached_tokens: int | None = None
    end: RequestEnd | None = None


class EngineDriver:
    """An engine with a worker attached, whose steps run when `step` is called. Time is what the test says."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        context_length: int = 512,
        policy: SchedulerPolicy | None = None,
        depth: int = 1,
        enable_prefix_caching: bool = True,
        attach: bool = True,
    ) -> None:
        self.now = 0.0
        policy = replace(policy or SchedulerPolicy(), max_steps_in_flight=depth)
        self.engine = Engine(policy, CacheSettings(block_size, enable_prefix_caching))
        self.limits = BatchLimits(
            policy.max_num_seqs,
            policy.max_num_batched_tokens,
            block_size,
            num_blocks,
            context_length,
            VOCABULARY,
        )
        self.worker = WorkerModel(self.limits)
        self.sent: list[Step] = []
        self.delivered: list[Deliver] = []
        self.told: dict[tuple[int, int], Told] = {}
        self.actions: list[Action] = []
        if attach:
            self.on_event(WorkerAttached(worker_facts(num_blocks=num_blocks, context_length=context_length)))

    def on_event(self, event: Event) -> list[Action]:
        """Hand over an event, take in the actions, and check that everything agrees."""
        if isinstance(event, WorkerAttached):
            # It holds no sequences, and what was on its way to it is lost.
            self.worker = WorkerModel(self.limits)
            self.sent.clear()
        actions = self.engine.on_event(event, self.now)
        for action in actions:
            if isinstance(action, SendStep):
                self.sent.append(action.step)
            elif isinstance(action, Deliver):
                self.delivered.append(action)
                self._take(action)
        self.actions += actions
        self.engine.check_integrity()
        return actions

    def submit(
        self,
        handle: int,
        prompt: list[int],
        *,
        client: int = 1,
        request_id: str | None = None,
        priority: Priority = Priority.NORMAL,
        cache_salt: bytes = b"",
        **params: object,
    ) -> list[Action]:
        """Submit one request; `params` as in SamplingParams, at most 8 tokens unless said."""
        sampling = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **params})  # type: ignore[arg-type]
        submission = Submission(
            handle,
            request_id or f"{client}-{handle}",
            token_bytes(prompt),
            sampling,
            priority=priority,
            cache_salt=cache_salt,
        )
        return self.on_event(ClientMessage(client, [submission]))

    def resume(self, client: int, submission: Submission, output: list[int]) -> list[Action]:
        """Submit a later attempt, whose client has `output` already."""
        self.told[client, submission.handle] = Told(list(output), num_cached_tokens=0 if output else None)
        return self.on_event(ClientMessage(client, [submission]))

    def step(self) -> StepResult:
        """Run the oldest step in flight and hand its result back, a second later."""
        step = self.sent.pop(0)
        result = self.worker.run(step)
        assert self.worker.last_rows == step.batch.row_slots.tolist(), "scheduler and worker derive other rows"
        self.now += 1.0
        self.on_event(StepReturned(result))
        return result

    def run(self) -> None:
        """Run steps until there is nothing to do."""
        while self.sent:
            self.step()

    def _take(self, action: Deliver) -> None:
        outputs = action.outputs
        for start in outputs.starts:
            told = self.told.setdefault((action.client, start.handle), Told())
            assert (told.num_cached_tokens, told.tokens) == (None, []), "it starts twice, or late"
            told.num_cached_tokens = start.num_cached_tokens
        rows = zip(outputs.handles.tolist(), outputs.first_indexes.tolist(), outputs.token_ids.tolist(), strict=True)
        for handle, first_index, token_id in rows:
            told = self.told.setdefault((action.client, handle), Told())
            assert told.end is None, "a token behind the end"
            assert first_index == len(told.tokens), "a gap or a repeat"
            assert told.num_cached_tokens is not None, "a token before the start"
            told.tokens.append(token_id)
        for end in outputs.ends:
            told = self.told.setdefault((action.client, end.handle), Told())
            assert told.end is None, "two ends"
            told.end = end
