"""The simulated worker process: claims by epoch, a device that runs steps in order, crashes and hangs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from lockstep.internal.v1 import worker_pb2
from services.worker.enter_checks import BatchLimits
from shared.limits import TOKEN_DTYPE
from tests.simulation.clock import Clock
from tests.simulation.faults import Fault, FaultMix
from tests.simulation.network import Pipe
from tests.support.cell_model import VOCABULARY, Oracle, WorkerModel

_STEP_S = 0.004
_TOKEN_S = 0.00002
_SLOWNESS = 30.0
_HANGS_S = (12.0, 40.0, 700.0, math.inf)
# An `Attach` that finds a launched step unanswered for so long has the worker restarted.
_STUCK_AFTER_S = 10.0
_RESTART_S = (0.5, 3.0)
_NOTICE_S = (0.0, 2.0)


def duration_of_step_s(num_prompt_tokens: int) -> float:
    """How long the device takes for a step with so many tokens of prompts: some 50 of them cost what a decode does."""
    return _STEP_S + _TOKEN_S * num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """A step's result on its way: the message, and by whom each row that is not finite was spoilt."""

    epoch: int
    step_id: int
    payload: bytes
    spoilers: list[int]
    is_nonsense: bool


@dataclass(frozen=True, slots=True)
class _Run:
    """A step on the device: in which run of the process, on which cells, and since when."""

    boot: int
    model: WorkerModel
    start: float
    request: worker_pb2.StepRequest


class StepStream:
    """The step stream of one epoch: steps go there, answers come back."""

    def __init__(self, epoch: int, steps: Pipe[bytes], answers: Pipe[Answer], on_break: Callable[[], None]) -> None:
        self.epoch = epoch
        self.steps = steps
        self.answers = answers
        self._on_break = on_break
        self.is_broken = False

    def break_(self) -> None:
        """Nothing more comes over it in time; the scheduler is told."""
        if not self.is_broken:
            self.is_broken = True
            self.steps.cut()
            self.answers.cut()
            self._on_break()


class SimulatedWorker:
    """Serves one epoch at a time and refuses what is older.

    Invariant: the cells of an epoch are written by its steps only, in the order of their numbers.
    """

    def __init__(
        self, clock: Clock, rng: Random, mix: FaultMix, limits: BatchLimits, *, oracle: Oracle, num_draft_tokens: int
    ) -> None:
        self.num_attaches = 0
        self._epoch = 0
        self._clock = clock
        self._rng = rng
        self._mix = mix
        self._limits = limits
        self._oracle = oracle
        self._num_draft_tokens = num_draft_tokens
        self._is_up = True
        self._boot = 0
        self._stream: StepStream | None = None
        self._model: WorkerModel | None = None
        self._next_step_id = 1
        # When the epochs of earlier models ended.
        self._ended_at: dict[WorkerModel, float] = {}
        # When the device begins and ends each step that it has not answered, in order.
        self._spans: deque[tuple[float, float]] = deque()

    def attach(self, epoch: int, make_stream: Callable[[], StepStream], on_refused: Callable[[int], None]) -> None:
        """A scheduler claims the worker; `make_stream` is called when it has it, else `on_refused` with our epoch."""
        if not self._is_up or epoch <= self._epoch:
            on_refused(self._epoch)
            return
        self._fence(epoch)
        returned_at = self._spans[-1][1] if self._spans else self._clock.now
        if returned_at - self._clock.now > _STUCK_AFTER_S:
            # The scheduler has it restarted.
            self._clock.after(_STUCK_AFTER_S, lambda: self._give_up(epoch, on_refused))
        else:
            self._clock.at(returned_at, lambda: self._open(epoch, make_stream, on_refused))

    def crash(self) -> None:
        """The process dies, and another one starts with empty cells. It may not know the epoch any more."""
        if not self._is_up:
            return
        self._is_up = False
        self._boot += 1
        self._model = None
        self._spans.clear()
        if self._rng.random() < 0.5:
            self._epoch = 0
        self._break_stream()
        self._clock.after(self._rng.uniform(*_RESTART_S), self._start)

    def on_step(self, stream: StepStream, payload: bytes) -> None:
        """A step arrives."""
        request = worker_pb2.StepRequest.FromString(payload)
        if self._model is None or not self._accepts(stream, request):
            stream.break_()
            return
        self._next_step_id = request.step_id + 1
        if self._strikes(Fault.WORKER_CRASH):
            self.crash()
            return
        if self._strikes(Fault.LINK_BREAK):
            self._clock.after(self._rng.uniform(0.0, 0.1), stream.break_)
        start = max(self._clock.now, self._spans[-1][1] if self._spans else 0.0)
        end = start + self._duration_s(request)
        self._spans.append((start, end))
        if end < math.inf:
            run = _Run(self._boot, self._model, start, request)
            self._clock.at(end, lambda: self._answer(stream, run))

    def _accepts(self, stream: StepStream, request: worker_pb2.StepRequest) -> bool:
        """The fence: only the present epoch's steps, from its stream, each in its turn."""
        return stream is self._stream and request.epoch == self._epoch and request.step_id == self._next_step_id

    def _fence(self, epoch: int) -> None:
        """From now on nothing of an older epoch is launched."""
        self._break_stream()
        if self._model is not None:
            self._ended_at[self._model] = self._clock.now
        self._epoch = epoch
        self._model = WorkerModel(
            self._limits,
            may_spoil=lambda: self._strikes(Fault.NOT_FINITE),
            proposer=self._oracle,
            num_draft_tokens=self._num_draft_tokens,
        )
        self._next_step_id = 1
        self._spans = deque(span for span in self._spans if span[0] < self._clock.now)

    def _break_stream(self) -> None:
        """End the present claim; what its holder sends until it is told is refused."""
        if self._stream is not None:
            self._stream.answers.cut()
            self._clock.after(self._rng.uniform(*_NOTICE_S), self._stream.break_)
            self._stream = None

    def _open(self, epoch: int, make_stream: Callable[[], StepStream], on_refused: Callable[[int], None]) -> None:
        if not self._is_up or epoch != self._epoch:
            on_refused(self._epoch)
            return
        self.num_attaches += 1
        self._stream = make_stream()

    def _give_up(self, epoch: int, on_refused: Callable[[int], None]) -> None:
        if epoch == self._epoch:
            self.crash()
        on_refused(self._epoch)

    def _start(self) -> None:
        self._is_up = True

    def _duration_s(self, request: worker_pb2.StepRequest) -> float:
        """How long the device takes; for ever when it hangs."""
        chunks = [*request.chunks, *(enter.chunk for enter in request.enters)]
        duration_s = duration_of_step_s(sum(len(chunk.token_ids) for chunk in chunks) // TOKEN_DTYPE.itemsize)
        if self._strikes(Fault.WORKER_SLOW):
            duration_s *= _SLOWNESS
        if self._strikes(Fault.WORKER_HANG):
            duration_s += self._rng.choice(_HANGS_S)
        return duration_s * self._rng.uniform(0.9, 1.1)

    def _answer(self, stream: StepStream, run: _Run) -> None:
        """The device has run a step, unless it was not launched when its epoch ended, or its process died."""
        was_launched = run.start < self._ended_at.get(run.model, math.inf)
        if run.boot != self._boot or not was_launched:
            return
        self._spans.popleft()
        result = run.model.answer(run.request)
        is_nonsense = self._strikes(Fault.RESULT_NONSENSE)
        if is_nonsense:
            _make_nonsense(result, self._rng)
        stream.answers.send(
            Answer(
                run.request.epoch,
                run.request.step_id,
                result.SerializeToString(),
                list(run.model.last_spoilers),
                is_nonsense,
            )
        )

    def _strikes(self, fault: Fault) -> bool:
        return self._mix.strikes(fault, self._rng)


def _make_nonsense(result: worker_pb2.StepResult, rng: Random) -> None:
    """Turn a result into one that no worker sends."""
    tokens = np.frombuffer(result.token_ids, TOKEN_DTYPE).tolist()
    counts = np.frombuffer(result.counts, TOKEN_DTYPE).tolist() if result.HasField("counts") else [1] * len(tokens)
    match rng.randrange(4):
        case 0:
            tokens.append(0)
        case 1 if tokens:
            tokens[rng.randrange(len(tokens))] = rng.choice([-1, VOCABULARY])
        case 2:
            result.counts = np.array([*counts, 1], TOKEN_DTYPE).tobytes()
        case _:
            result.not_finite_rows = np.array([len(counts)], TOKEN_DTYPE).tobytes()
    result.token_ids = np.array(tokens, TOKEN_DTYPE).tobytes()
