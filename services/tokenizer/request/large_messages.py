"""Checks large messages off the event loop: arguments, schemas and variables are JSON, which is parsed in the check."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import Message

from services.tokenizer.text.encoding_pools import EncodingPool

_MAX_BYTES_ON_LOOP = 32 * 1024

T = TypeVar("T")


async def checked(pool: EncodingPool, message: Message, check: Callable[[], T]) -> T:
    """What `check` makes of a message, in `pool` if it is large; raises as it does.

    A message of megabytes, of many small values, would hold all streams for a second.
    """
    return await pool.run(check) if message.ByteSize() > _MAX_BYTES_ON_LOOP else check()
