"""The sending side of one `Exchange` stream."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from lockstep.internal.v1 import exchange_pb2
from services.tokenizer.exchange.exchange_codec import encode_handles
from shared.ids import RequestHandle

# Submits beyond this go into the next message, so that each stays far below the limit on message size.
_SUBMIT_BYTES_PER_MESSAGE = 8 * 1024 * 1024


class ExchangeLink:
    """Collects what is to be sent while the last message is being sent."""

    def __init__(self, make_submit: Callable[[RequestHandle], exchange_pb2.Submit | None]) -> None:
        """`make_submit` is called just before a message is sent, so that ages and outputs are current; None submits
        nothing.
        """
        # When the scheduler was last heard from, in seconds of `time.monotonic`; initially when the link was made.
        self.heard_at = time.monotonic()
        self._make_submit = make_submit
        self._is_closed = False
        self._submits: deque[RequestHandle] = deque()
        self._stop_ats: list[exchange_pb2.StopAt] = []
        self._aborts: list[RequestHandle] = []
        self._is_beat_due = False
        self._is_draining = False
        self._has_news = asyncio.Event()

    def submit(self, handle: RequestHandle) -> None:
        """Send a request's submit."""
        self._submits.append(handle)
        self._has_news.set()

    def stop_at(self, handle: RequestHandle, num_tokens: int) -> None:
        """Report that a stop string ended a choice after `num_tokens` tokens."""
        self._stop_ats.append(exchange_pb2.StopAt(handle=handle, num_tokens=num_tokens))
        self._has_news.set()

    def abort(self, handle: RequestHandle) -> None:
        """Send a request's abort."""
        self._aborts.append(handle)
        self._has_news.set()

    def beat(self) -> None:
        """Send a heartbeat."""
        self._is_beat_due = True
        self._has_news.set()

    def announce_drain(self) -> None:
        """Say, now and with every later message, that this replica lets its answers finish and then ends."""
        self._is_draining = True
        self.beat()

    def close(self) -> None:
        """End `messages`."""
        self._is_closed = True
        self._has_news.set()

    async def messages(self) -> AsyncIterator[exchange_pb2.ExchangeRequest]:
        """What to send until closed; each message holds everything since the last one."""
        while True:
            await self._has_news.wait()
            if self._is_closed:
                return
            message = self._take_message()
            # It is empty if all requests to be submitted have ended.
            if message.submits or message.stop_ats or message.abort_handles or message.is_heartbeat:
                yield message

    def _take_message(self) -> exchange_pb2.ExchangeRequest:
        message = exchange_pb2.ExchangeRequest(
            stop_ats=self._stop_ats,
            abort_handles=encode_handles(self._aborts),
            is_heartbeat=self._is_beat_due,
            is_draining=self._is_draining,
        )
        self._stop_ats, self._aborts, self._is_beat_due = [], [], False
        num_bytes = 0
        while self._submits and num_bytes < _SUBMIT_BYTES_PER_MESSAGE:
            submit = self._make_submit(self._submits.popleft())
            if submit is not None:
                num_bytes += submit.ByteSize()
                message.submits.append(submit)
        if not self._submits:
            self._has_news.clear()
        return message
