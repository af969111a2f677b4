"""Checks large messages off the event loop: arguments, schemas and variables are JSON, which is parsed in the check."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import Message

_MAX_BYTES_ON_LOOP = 32 * 1024

T = TypeVar("T")


async def checked(message: Message, check: Callable[[], T]) -> T:
    """What `check` makes of a message; raises as it does.

    A message of megabytes, of many small values, would hold all streams for a second.
    """
    return await asyncio.to_thread(check) if message.ByteSize() > _MAX_BYTES_ON_LOOP else check()
