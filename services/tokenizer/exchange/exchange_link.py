"""What goes up one `Exchange` stream: submits, stops and aborts pile up while the last message leaves."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from lockstep.internal.v1 import exchange_pb2
from services.tokenizer.exchange.exchange_codec import encode_handles

# Submits beyond this go in the next message, so that one is always far below what a cell's message may be.
_SUBMIT_BYTES_PER_MESSAGE = 8 * 1024 * 1024


class ExchangeLink:
    """Collects what is to be sent. Nothing is sent any more once it is closed.

    Attributes:
        heard_s: When the scheduler was heard last, in seconds of `time.monotonic`; at first when the link was made.
    """

    def __init__(self, make_submit: Callable[[int], exchange_pb2.Submit | None]) -> None:
        """Begin a link.

        Args:
            make_submit: The submit of a handle, made at the moment it leaves: its ages and its output so far are
                those of this moment. None when the request has ended.
        """
        self.heard_s = time.monotonic()
        self._make_submit = make_submit
        self._is_closed = False
        self._submits: deque[int] = deque()
        self._stop_ats: list[exchange_pb2.StopAt] = []
        self._aborts: list[int] = []
        self._is_beat_due = False
        self._has_news = asyncio.Event()

    def submit(self, handle: int) -> None:
        """Send a request up."""
        self._submits.append(handle)
        self._has_news.set()

    def stop_at(self, handle: int, num_tokens: int) -> None:
        """Tell that a stop was found in a request's text, after so many completion tokens."""
        self._stop_ats.append(exchange_pb2.StopAt(handle=handle, num_tokens=num_tokens))
        self._has_news.set()

    def abort(self, handle: int) -> None:
        """Have a request forgotten that was sent up."""
        self._aborts.append(handle)
        self._has_news.set()

    def beat(self) -> None:
        """Give a sign of life."""
        self._is_beat_due = True
        self._has_news.set()

    def close(self) -> None:
        """The stream is over."""
        self._is_closed = True
        self._has_news.set()

    async def messages(self) -> AsyncIterator[exchange_pb2.ExchangeRequest]:
        """What goes up, until the link is closed: each message holds all that piled up while the last one left."""
        while True:
            await self._has_news.wait()
            if self._is_closed:
                return
            message = self._take_message()
            # Those that wanted to be submitted may all have ended.
            if message.submits or message.stop_ats or message.abort_handles or message.is_heartbeat:
                yield message

    def _take_message(self) -> exchange_pb2.ExchangeRequest:
        message = exchange_pb2.ExchangeRequest(
            stop_ats=self._stop_ats, abort_handles=encode_handles(self._aborts), is_heartbeat=self._is_beat_due
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
