"""The scheduler's processor time for one decode step of coupled ranks: the engine and its messages, no sockets."""

from __future__ import annotations

import gc
import time

import numpy as np

from lockstep.internal.v1 import exchange_pb2, worker_pb2
from services.scheduler.cell.engine import Engine
from services.scheduler.cell.events import (
    Action,
    ClientMessage,
    Deliver,
    DomainAttached,
    SendStep,
    StepReturned,
    Submission,
)
from services.scheduler.core.batch.step import Step
from services.scheduler.core.policy import CacheSettings, CellTopology, SchedulerPolicy
from services.scheduler.core.worker_facts import WorkerFacts
from services.scheduler.server.exchange_codec import encode_outputs
from shared.ids import DpRank, RequestHandle
from shared.request.limits import TOKEN_DTYPE
from shared.request.sampling_params import SamplingParams
from shared.step.codec import encode_step, parse_result

_VOCABULARY = 32_003
_CONTEXT_LENGTH = 8192
_NUM_PROMPT_TOKENS = 64
_MAX_TOKENS = 4096
_NUM_WARM_UP_STEPS = 20


class CoupledEngine:
    """An engine whose coupled ranks decode `num_rows` sequences each. Its virtual time does not advance."""

    def __init__(self, dp_size: int, num_rows: int) -> None:
        self._dp_size = dp_size
        self._num_rows = num_rows
        policy = SchedulerPolicy(
            max_num_seqs=num_rows,
            max_num_batched_tokens=num_rows * _NUM_PROMPT_TOKENS,
            enable_mixed_steps=False,
            max_waiting_requests=dp_size * num_rows,
        )
        topology = CellTopology(dp_size, is_coupled=dp_size > 1)
        self._ranks = topology.ranks
        self._engine = Engine(policy, CacheSettings(), topology)
        self._sent: list[list[Step]] = [[] for _ in range(dp_size)]
        self._enter()
        for _ in range(_NUM_WARM_UP_STEPS):
            self._answer_all()

    def measure_step_s(self, num_steps: int) -> float:
        """Processor time of one step of all ranks: parse results, plan and build steps, build outputs."""
        gc.collect()
        gc.disable()
        spent_s = 0.0
        for _ in range(num_steps):
            results = [(rank, self._make_result(self._sent[rank].pop(0))) for rank in self._ranks]
            began_at = time.process_time()
            for rank, result in results:
                self._take(rank, result)
            spent_s += time.process_time() - began_at
        gc.enable()
        return spent_s / num_steps

    def _enter(self) -> None:
        num_blocks = self._num_rows * -(-_CONTEXT_LENGTH // CacheSettings().block_size)
        facts = WorkerFacts(1, "digest", _CONTEXT_LENGTH, _VOCABULARY, (), num_blocks)
        self._perform(self._engine.on_event(DomainAttached(0, (facts,) * self._dp_size), 0.0))
        rng = np.random.default_rng(1)
        submissions = [
            Submission(
                RequestHandle(handle),
                f"request-{handle}",
                rng.integers(_VOCABULARY, size=_NUM_PROMPT_TOKENS).astype(TOKEN_DTYPE).tobytes(),
                SamplingParams(max_tokens=_MAX_TOKENS, ignore_eos=True),
            )
            for handle in range(self._dp_size * self._num_rows)
        ]
        self._perform(self._engine.on_event(ClientMessage(1, submissions), 0.0))
        while self._engine.state().num_running < len(submissions):
            self._answer_all()

    def _answer_all(self) -> None:
        for rank in self._ranks:
            self._take(rank, self._make_result(self._sent[rank].pop(0)))

    def _make_result(self, step: Step) -> bytes:
        tokens = np.zeros(len(step.batch.row_slots), TOKEN_DTYPE).tobytes()
        return worker_pb2.StepResult(epoch=step.epoch, step_id=step.step_id, token_ids=tokens).SerializeToString()

    def _take(self, rank: DpRank, payload: bytes) -> None:
        result = parse_result(worker_pb2.StepResult.FromString(payload))
        self._perform(self._engine.on_event(StepReturned(rank, result), 0.0))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendStep(rank, step):
                    encode_step(step).SerializeToString()
                    self._sent[rank].append(step)
                case Deliver(_, outputs):
                    exchange_pb2.ExchangeResponse(outputs=encode_outputs(outputs)).SerializeToString()
