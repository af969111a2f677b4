"""Our engine as a contestant: the real path from a worker's bytes to the bytes for one tokenizer replica."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from lockstep.internal.v1 import exchange_pb2, worker_pb2
from services.scheduler.cell.engine import Engine
from services.scheduler.cell.events import Action, Beat, Deliver, DomainAttached, Event, SendStep, StepReturned
from services.scheduler.core.policy import CacheSettings, SchedulerPolicy
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from services.scheduler.core.worker_facts import WorkerFacts
from services.scheduler.server.exchange_codec import decode_request, encode_outputs
from shared.ids import DpRank
from shared.process.lifecycle import freeze_garbage, hold_full_collections
from shared.request.limits import TOKEN_DTYPE
from shared.step.codec import encode_step, parse_result
from shared.wire import introduce_self
from tests.bench.parts.stand_in_worker import StandInBatch
from tests.bench.parts.tokens import VOCABULARY
from tests.bench.peers.contestant import MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS, Request, Sizes, StepTokens, Stopwatch

CLIENT = 1
EPOCH = 1
RANK = DpRank(0)
STEP_S = 0.01
MAX_WAITING = 1_000_000


class LockstepScheduler:
    """One engine with one worker and one replica; all messages are bytes. With several tenants, they take turns."""

    def __init__(
        self,
        sizes: Sizes,
        *,
        queue_policy: QueuePolicy = QueuePolicy.FCFS,
        num_tenants: int = 1,
        has_recurrent_state: bool = False,
    ) -> None:
        self.stopwatch = Stopwatch()
        self.step_bytes = 0
        self.result_bytes = 0
        self._num_tenants = num_tenants
        self._now = 0.0
        self._sent: deque[bytes] = deque()
        self._delivered: list[bytes] = []
        self._worker = StandInBatch(sizes.max_num_seqs)
        policy = SchedulerPolicy(
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            enable_mixed_steps=False,
            queue_policy=queue_policy,
            max_waiting_requests=MAX_WAITING,
            max_waiting_tokens=MAX_WAITING * MAX_MODEL_LEN,
        )
        self._engine = Engine(policy, CacheSettings(sizes.block_size))
        facts = WorkerFacts(EPOCH, "", MAX_MODEL_LEN, VOCABULARY, (2,), sizes.num_blocks, introduction=introduce_self())
        if has_recurrent_state:
            # As a worker divides its memory.
            num_checkpoints = sizes.num_blocks * sizes.block_size // 4096
            facts = replace(facts, state_bytes_per_slot=1, num_checkpoint_slots=num_checkpoints)
        self._handle(lambda: DomainAttached(0, (facts,)))

    def settle(self) -> None:
        """See `Contestant`."""
        freeze_garbage()
        hold_full_collections()

    def submit(self, requests: Sequence[Request]) -> None:
        """See `Contestant`."""
        submits = [_submit_of(request) for request in requests]
        if self._num_tenants > 1:
            for submit in submits:
                submit.tenant.name = f"tenant-{submit.handle % self._num_tenants}"
        self._send(exchange_pb2.ExchangeRequest(submits=submits))

    def abort(self, keys: Sequence[int]) -> None:
        """Abort requests."""
        self._send(exchange_pb2.ExchangeRequest(abort_handles=np.array(keys, "<u4").tobytes()))

    def step(self) -> StepTokens:
        """See `Contestant`."""
        step_bytes = self._sent.popleft()
        request = worker_pb2.StepRequest.FromString(step_bytes)
        token_ids = self._worker.run(request).astype(TOKEN_DTYPE).tobytes()
        result = worker_pb2.StepResult(epoch=EPOCH, step_id=request.step_id, token_ids=token_ids, device_time_us=10_000)
        result_bytes = result.SerializeToString()
        self.step_bytes, self.result_bytes = len(step_bytes), len(result_bytes)
        self._now += STEP_S
        self._handle(lambda: StepReturned(RANK, parse_result(worker_pb2.StepResult.FromString(result_bytes))))
        return self._take_delivered()

    def _send(self, message: exchange_pb2.ExchangeRequest) -> None:
        data = message.SerializeToString()
        self._handle(lambda: decode_request(CLIENT, exchange_pb2.ExchangeRequest.FromString(data)))

    def _handle(self, parse: Callable[[], Event]) -> None:
        """Handle a message as the service does, up to the bytes that it would send."""
        with self.stopwatch.running():
            for action in self._engine.on_event(parse(), self._now):
                self._perform(action)
            self._engine.next_wakeup()

    def _perform(self, action: Action) -> None:
        match action:
            case SendStep(_, step):
                self._sent.append(encode_step(step).SerializeToString())
            case Deliver(_, outputs):
                response = exchange_pb2.ExchangeResponse(outputs=encode_outputs(outputs))
                self._delivered.append(response.SerializeToString())
            case Beat():
                pass
            case _:
                raise AssertionError(f"unexpected: {action}")

    def _take_delivered(self) -> StepTokens:
        """Parse what the replica received; no request may fail."""
        messages = [exchange_pb2.ExchangeResponse.FromString(data).outputs for data in self._delivered]
        self._delivered.clear()
        ends = [end for message in messages for end in message.ends]
        assert not any(end.HasField("error") for end in ends), ends
        return StepTokens(
            _column(message.handles for message in messages).astype(np.int64),
            _column(message.token_ids for message in messages).astype(np.int64),
            [end.handle for end in ends],
        )


def _submit_of(request: Request) -> exchange_pb2.Submit:
    return exchange_pb2.Submit(
        handle=request.key,
        request_id=f"{request.key:032x}",
        prompt_token_ids=request.prompt.astype(TOKEN_DTYPE).tobytes(),
        max_tokens=request.max_tokens,
        temperature=1.0,
        top_p=1.0,
        # The stand-in worker identifies requests by seed.
        seed=request.key,
        ignore_eos=True,
        attempt=1,
    )


def _column(parts: Iterable[bytes]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.frombuffer(b"".join(parts), TOKEN_DTYPE)
