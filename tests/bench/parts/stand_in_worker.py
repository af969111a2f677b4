"""A worker that computes nothing, for benchmarks of the scheduler: WorkerService with a virtual device.

    python -m tests.bench.parts.stand_in_worker --address unix:/tmp/worker --dp-rank 0 --dp-size 2 --step-us 5000

It is one DP rank. As a program it serves until its input ends, and then writes the steps it has run to stdout, as a
JSON list of `DeviceStep` fields.

A step starts on the device when it has arrived and the previous step has ended, and ends a fixed time later. Its result
is sent at that time, so that steps sent ahead wait as they would for a real device. Only as much of the batch is kept
as is needed to return the right token for each row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import astuple, dataclass
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import uvloop

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from shared.network.heartbeat import HEARTBEAT_S
from shared.network.rpc import make_server
from shared.request.limits import TOKEN_DTYPE
from shared.wire import introduce_self
from tests.bench.parts.tokens import VOCABULARY, IntArray, expected_tokens

CONTEXT_LENGTH = 131_072
# The most lateness of a timer on an idle virtual core; the rest of a wait is a busy loop.
TIMER_SLACK_S = 300e-6

SlotColumn = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One step as seen by the device; times in seconds of `time.monotonic`."""

    kind: int
    num_rows: int
    arrived_at: float
    started_at: float
    idle_s: float
    """How long the device waited for the step."""
    late_s: float
    """How long after the step's end its result was sent."""


class StandInWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Accepts any claim and any steps of one scheduler. Needs the main thread's loop, since it uses the process timer.

    Attributes:
        steps: The steps whose results were sent, in order.
    """

    def __init__(self, step_s: float, num_blocks: int, *, dp_rank: int = 0, dp_size: int = 1) -> None:
        """Make a DP rank, coupled with the others if `dp_size` is above 1."""
        self.steps: list[DeviceStep] = []
        self._layout = worker_pb2.RankLayout(
            dp_rank=dp_rank, dp_size=dp_size, tp_size=1, has_expert_parallel=dp_size > 1
        )
        self._step_s = step_s
        self._num_blocks = num_blocks
        self._batch = StandInBatch(0)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on `server`."""
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    async def Attach(
        self, request: worker_pb2.AttachRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.AttachResponse:
        """See worker.proto."""
        self._batch = StandInBatch(request.max_num_seqs)
        return worker_pb2.AttachResponse(
            model_digest="stand-in",
            context_length=CONTEXT_LENGTH,
            logits_width=VOCABULARY,
            num_blocks=self._num_blocks,
            ops_backend="stand-in",
            proposed_prompt_tokens=16384,
            layout=self._layout,
            introduction=introduce_self().encode(),
        )

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """See worker.proto."""
        arrivals: asyncio.Queue[tuple[float, worker_pb2.StepRequest] | None] = asyncio.Queue()
        reader = asyncio.create_task(_read(request_iterator, arrivals))
        turn = asyncio.Lock()
        beats = asyncio.create_task(self._beat(context, turn))
        timer = _Timer()
        ended_at = 0.0
        try:
            while (arrival := await arrivals.get()) is not None:
                arrived_at, request = arrival
                started_at = max(arrived_at, ended_at)
                idle_s, ended_at = started_at - ended_at, started_at + self._step_s
                result = self._compute(request)
                await timer.wait_until(ended_at)
                late_s = time.monotonic() - ended_at
                async with turn:
                    await context.write(result)
                num_rows = len(result.token_ids) // TOKEN_DTYPE.itemsize
                self.steps.append(DeviceStep(request.kind, num_rows, arrived_at, started_at, idle_s, late_s))
        finally:
            reader.cancel()
            beats.cancel()
            timer.close()

    async def _beat(self, context: grpc.aio.ServicerContext, turn: asyncio.Lock) -> None:
        """Send heartbeats between the results; the first one tells the scheduler that the stream is open."""
        while True:
            heartbeat = worker_pb2.Heartbeat(progress=len(self.steps))
            async with turn:
                await context.write(worker_pb2.StepResult(heartbeat=heartbeat))
            await asyncio.sleep(HEARTBEAT_S)

    def _compute(self, request: worker_pb2.StepRequest) -> worker_pb2.StepResult:
        return worker_pb2.StepResult(
            epoch=request.epoch,
            step_id=request.step_id,
            token_ids=self._batch.run(request).astype(TOKEN_DTYPE).tobytes(),
            device_time_us=round(self._step_s * 1e6),
        )


class StandInBatch:
    """The minimum of a worker's batch: the sequence in each slot, and its next token.

    Columns are indexed by slot.
    """

    def __init__(self, num_slots: int) -> None:
        self._order: SlotColumn = np.empty(0, np.int32)
        self._has_later_tokens = np.zeros(num_slots, bool)
        self._seed = np.zeros(num_slots, np.int64)
        self._position = np.zeros(num_slots, np.int64)

    def run(self, request: worker_pb2.StepRequest) -> IntArray:
        """Apply a step's changes in protocol order; returns the tokens of its rows."""
        leaving = _column(request.leave_slots)
        if leaving.size:
            self._order = self._order[~np.isin(self._order, leaving)]
        rows = self._take_decodes(request)
        chunks = [*request.chunks, *(enter.chunk for enter in request.enters)]
        if chunks:
            self._enter(request.enters)
            slots = np.array([chunk.slot for chunk in chunks], np.int32)
            self._has_later_tokens[slots] = [chunk.num_later_tokens > 0 for chunk in chunks]
            rows = np.concatenate([rows, slots[~self._has_later_tokens[slots]]])
        tokens = expected_tokens(self._seed[rows], self._position[rows])
        self._position[rows] += 1
        return tokens

    def _take_decodes(self, request: worker_pb2.StepRequest) -> SlotColumn:
        if request.is_dummy or request.kind == worker_pb2.STEP_KIND_PREFILL:
            return np.empty(0, np.int32)
        if request.HasField("decode_slots"):
            return _column(request.decode_slots)
        return self._order[~self._has_later_tokens[self._order]]

    def _enter(self, enters: Any) -> None:
        for enter in enters:
            slot, chunk = enter.chunk.slot, enter.chunk
            num_tokens = enter.num_cached_tokens + len(_column(chunk.token_ids)) + chunk.num_later_tokens
            self._seed[slot] = enter.seed
            self._position[slot] = num_tokens - enter.num_prompt_tokens
        self._order = np.append(self._order, np.array([enter.chunk.slot for enter in enters], np.int32))


class _Timer:
    """Wakes one waiter with microsecond precision; the timers of an event loop have milliseconds.

    Uses the process's interval timer and SIGALRM until closed.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_due = asyncio.Event()
        self._loop.add_signal_handler(signal.SIGALRM, self._is_due.set)

    async def wait_until(self, when: float) -> None:
        """Return at `when`, in seconds of `time.monotonic`; at once if that has passed."""
        wait_s = when - TIMER_SLACK_S - time.monotonic()
        if wait_s > 0:
            self._is_due.clear()
            signal.setitimer(signal.ITIMER_REAL, wait_s)
            await self._is_due.wait()
        while time.monotonic() < when:
            pass

    def close(self) -> None:
        """Release the timer."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._loop.remove_signal_handler(signal.SIGALRM)


async def _read(
    requests: AsyncIterator[worker_pb2.StepRequest],
    arrivals: asyncio.Queue[tuple[float, worker_pb2.StepRequest] | None],
) -> None:
    """Queue each step with its arrival time, and None after the last."""
    async for request in requests:
        if request.step_id:
            arrivals.put_nowait((time.monotonic(), request))
    arrivals.put_nowait(None)


def _column(data: bytes) -> SlotColumn:
    return np.frombuffer(data, TOKEN_DTYPE)


async def _serve(args: argparse.Namespace) -> None:
    worker = StandInWorker(args.step_us / 1e6, args.num_blocks, dp_rank=args.dp_rank, dp_size=args.dp_size)
    server = make_server(args.address, [worker], internal=True)
    await server.start()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0)
    json.dump([astuple(step) for step in worker.steps], sys.stdout)


def main() -> None:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True)
    parser.add_argument("--dp-rank", type=int, default=0)
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--step-us", type=float, default=0.0, help="duration of a step")
    parser.add_argument("--num-blocks", type=int, default=16384)
    uvloop.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
