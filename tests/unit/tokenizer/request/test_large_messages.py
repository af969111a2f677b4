"""Messages whose checks take long are checked beside the event loop."""

from __future__ import annotations

import threading

import pytest

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.request.large_messages import checked


@pytest.mark.parametrize(("num_bytes", "is_beside"), [(100, False), (100_000, True)])
async def test_only_a_large_message_is_checked_beside_the_loop(num_bytes: int, *, is_beside: bool) -> None:
    message = tokenizer_pb2.Prompt(text="x" * num_bytes)
    thread = await checked(message, threading.current_thread)
    assert (thread is not threading.current_thread()) == is_beside


async def test_a_refusal_is_passed_on() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        await checked(tokenizer_pb2.Prompt(text="x" * 100_000), lambda: int("x"))
