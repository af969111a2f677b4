"""The Join stream between a member and the leader of its group, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import Context
from random import Random
from typing import Any, TypeVarTuple, cast

import grpc
from typing_extensions import override

from lockstep.internal.v1 import worker_pb2
from tests.simulation.faults import FaultMix
from tests.simulation.network.clock import Clock
from tests.simulation.network.network import Pipe, Trouble
from tests.simulation.network.virtual_loop import VirtualLoop

# On one host a broken connection is noticed quickly.
NOTICE_S = (0.0, 0.5)

_Ts = TypeVarTuple("_Ts")

_Handler = Callable[[AsyncIterator[worker_pb2.JoinRequest], grpc.aio.ServicerContext], Coroutine[Any, Any, None]]


class _GroupLoop(VirtualLoop):
    """The event loop of a process of a group.

    Its timers are background events, since links send heartbeats forever. All ready callbacks run one after the other,
    as one event of the clock.
    """

    def __init__(self, clock: Clock, when_running: Callable[[Callable[[], object]], None]) -> None:
        super().__init__(clock, when_running, wakes_at=lambda when: when)
        self._is_planned = False

    @override
    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._make_ready(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """See `AbstractEventLoop`; the real device calls it from its own thread."""
        return self.call_soon(callback, *args, context=context)

    @override
    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._clock.at(when, lambda: self._make_ready(handle), is_background=True)
        return handle

    def close(self) -> None:
        """Discard all tasks without running them any further, as when the process is killed."""
        self._ready.clear()
        with self.running():
            for task in self._tasks:
                task.get_coro().close()

    @override
    def is_closed(self) -> bool:
        return False

    def _make_ready(self, handle: asyncio.Handle) -> None:
        self._ready.append(handle)
        if not self._is_planned:
            self._is_planned = True
            self._clock.at(self._clock.now, lambda: self._when_running(self._run_ready))

    def _run_ready(self) -> None:
        with self.running():
            while self._ready:
                self._take_turn()
        self._is_planned = False


class Life:
    """One start of a process: its event loop, and the actions that run in it until it ends."""

    def __init__(self, clock: Clock, when_running: Callable[[Callable[[], object]], None]) -> None:
        """Begin; `when_running` runs an action in the process, now or when it is continued."""
        self.is_over = False
        self._clock = clock
        self._when_running = when_running
        self.loop = _GroupLoop(clock, self.do)  # type: ignore[abstract]

    def do(self, action: Callable[[], object]) -> None:
        """Run an action in the process, unless it has ended by then."""
        self._when_running(lambda: None if self.is_over else action())

    def end(self) -> None:
        """End the process; its pending actions never run."""
        if not self.is_over:
            self.is_over = True
            # One of its own tasks may be the caller.
            self._clock.after(0.0, self.close)

    def close(self) -> None:
        """Discard the tasks of the process."""
        self.is_over = True
        self.loop.close()


class JoinStream:
    """Delivers the messages of each end to the other, in order, until it breaks; each end notices that at its own time.

    For the leader's handler it plays both the context of the call and the request iterator; for the member it plays the
    channel and, through `_Call` and `_MeetCall`, the calls. The leader answers Meet at once.
    """

    def __init__(
        self,
        clock: Clock,
        rng: Random,
        mix: FaultMix,
        leader: Life,
        member: Life,
        *,
        answer: worker_pb2.MeetResponse,
        handler: _Handler,
    ) -> None:
        """Prepare a stream from a member to a leader.

        Args:
            answer: What the leader answers to Meet.
            handler: The leader's of Join; it begins when the member opens the stream.
        """
        self._clock = clock
        self._rng = rng
        self._leader = leader
        self._member = member
        self._handler = handler
        self._is_broken = False
        self._task: asyncio.Task[None] | None = None
        self._requests: asyncio.Queue[worker_pb2.JoinRequest] = asyncio.Queue()
        self._responses: asyncio.Queue[worker_pb2.JoinResponse | None] = asyncio.Queue()
        self._answers: asyncio.Queue[worker_pb2.MeetResponse | None] = asyncio.Queue()
        self._answers.put_nowait(answer)
        self._up: Pipe[worker_pb2.JoinRequest] = Pipe(
            clock,
            rng,
            mix,
            Trouble(),
            deliver=lambda request: leader.do(lambda: self._requests.put_nowait(request)),
            on_loss=self.break_,
        )
        self._down: Pipe[worker_pb2.JoinResponse] = Pipe(
            clock,
            rng,
            mix,
            Trouble(),
            deliver=lambda response: member.do(lambda: self._responses.put_nowait(response)),
            on_loss=self.break_,
        )

    # The member's end.

    async def __aenter__(self) -> JoinStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.break_()

    def stream_stream(self, *_: Any, **__: Any) -> Callable[..., _Call]:
        """Return the method that opens the call, as the stub expects of a channel."""
        return self._open

    def unary_stream(self, *_: Any, **__: Any) -> Callable[..., _MeetCall]:
        """Return the method that asks where to meet, as the stub expects of a channel."""
        return lambda _: _MeetCall(self._answers)

    def _open(self, **_: Any) -> _Call:
        self._leader.do(self._begin)
        return _Call(self)

    def send_request(self, request: worker_pb2.JoinRequest) -> None:
        """Send a message from the member."""
        self._up.send(request)

    async def next_response(self) -> worker_pb2.JoinResponse | None:
        """Wait for the leader's next message; None when the stream has ended."""
        return await self._responses.get()

    # The leader's end.

    def __aiter__(self) -> JoinStream:
        return self

    async def __anext__(self) -> worker_pb2.JoinRequest:
        return await self._requests.get()

    async def write(self, response: worker_pb2.JoinResponse) -> None:
        """Send a message from the leader; the part of a `ServicerContext` that the handler uses."""
        self._down.send(response)

    def _begin(self) -> None:
        handler = self._handler(self, cast(grpc.aio.ServicerContext, self))
        self._task = self._leader.loop.create_task(handler)
        self._task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.result()
        self.break_()

    # The network between them.

    def hold(self, until: float, *, is_up_silent: bool, is_down_silent: bool) -> None:
        """Deliver nothing before `until`, in the given directions."""
        if is_up_silent:
            self._up.hold(until)
        if is_down_silent:
            self._down.hold(until)

    def break_(self) -> None:
        """Break the stream; messages in transit are lost."""
        if self._is_broken:
            return
        self._is_broken = True
        self._up.cut()
        self._down.cut()
        self._clock.after(self._rng.uniform(*NOTICE_S), lambda: self._leader.do(self._cancel))
        self._clock.after(self._rng.uniform(*NOTICE_S), lambda: self._member.do(self._end))

    def _end(self) -> None:
        self._answers.put_nowait(None)
        self._responses.put_nowait(None)

    def _cancel(self) -> None:
        # gRPC cancels a call's handler when the connection is lost.
        if self._task is not None:
            self._task.cancel()


class _Call:
    """The member's call."""

    def __init__(self, stream: JoinStream) -> None:
        self._stream = stream

    async def write(self, request: worker_pb2.JoinRequest) -> None:
        """See `grpc.aio.StreamStreamCall`."""
        self._stream.send_request(request)

    async def read(self) -> Any:
        """See `grpc.aio.StreamStreamCall`."""
        response = await self._stream.next_response()
        return grpc.aio.EOF if response is None else response


class _MeetCall:
    """The member's call of Meet."""

    def __init__(self, answers: asyncio.Queue[worker_pb2.MeetResponse | None]) -> None:
        self._answers = answers

    async def read(self) -> Any:
        """See `grpc.aio.UnaryStreamCall`."""
        answer = await self._answers.get()
        return grpc.aio.EOF if answer is None else answer

    def cancel(self) -> None:
        """See `grpc.aio.UnaryStreamCall`."""
