"""Reads the messages of calls: what costs more than its size is refused before it is parsed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Set
from functools import partial
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from shared.errors import InvalidRequestError
from shared.limited_log import LimitedLog
from shared.network.field_counts import check_num_fields
from shared.network.turns import Slots

logger = logging.getLogger(__name__)

MAX_UNCOUNTED_BYTES = 32 * 1024
"""A message of so many bytes cannot have fields that are noticeable in streams."""
# Counting is done by threads, which take time from the event loop.
_NUM_COUNTED_AT_ONCE = 2

Read = Callable[[Any], Awaitable[Any]]


class MessageReader:
    """Reads messages; where strangers may send them, their fields are counted before."""

    def __init__(self, counted: Set[str], on_refusal: Callable[[str, str], None]) -> None:
        """Read the messages of one server.

        Args:
            counted: The methods whose messages' fields are counted.
            on_refusal: Called with the method and the reason when a message is refused.
        """
        self._counted = counted
        self._on_refusal = on_refusal
        self._slots = Slots(_NUM_COUNTED_AT_ONCE)
        self._log = LimitedLog(logger)

    def make_read(self, method: str, parse: Callable[[bytes], Any], *, is_stream: bool) -> Read:
        """What reads a call's message, or its stream of messages.

        It raises `InvalidRequestError` for a message that cannot be parsed, or has too many fields.

        Args:
            method: The call's.
            parse: `FromString` of the messages' class.
            is_stream: Whether there is a stream of messages.
        """
        read = partial(self._read_counted if method in self._counted else self._read, method, parse)
        return partial(_read_all, read) if is_stream else read

    async def _read(self, method: str, parse: Callable[[bytes], Any], data: bytes) -> Any:
        try:
            return parse(data)
        except (DecodeError, ValueError) as error:
            raise self._not_parsed(method) from error

    async def _read_counted(self, method: str, parse: Callable[[bytes], Any], data: bytes) -> Any:
        if len(data) > MAX_UNCOUNTED_BYTES:
            kind: Descriptor = parse.__self__.DESCRIPTOR  # type: ignore[attr-defined]
            try:
                async with self._slots:
                    await asyncio.to_thread(check_num_fields, data, kind)
            except InvalidRequestError as error:
                self._on_refusal(method, error.reason)
                raise
            except ValueError as error:
                raise self._not_parsed(method) from error
        return await self._read(method, parse, data)

    def _not_parsed(self, method: str) -> InvalidRequestError:
        self._log.warning("messages cannot be parsed", kind=method, method=method)
        self._on_refusal(method, InvalidRequestError.reason)
        return InvalidRequestError("the message cannot be parsed: it is truncated, or a string in it is not UTF-8")


async def _read_all(read: Read, messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    return (await read(data) async for data in messages)
