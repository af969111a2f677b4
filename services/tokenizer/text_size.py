"""The limits on the texts of one request."""

from __future__ import annotations

from shared.errors import RequestTooLargeError

MAX_TEXT_BYTES = 3 * 1024 * 1024
MAX_ITEMS = 1000
"""The most documents or prompts of a `Score` call."""
MAX_INPUTS = 2048
"""The most texts of an `Embed` call."""
MAX_CHOICE_TEXTS = 1024
"""The most texts of which an answer is to be one."""


def check_text(text: str) -> None:
    """`check_text_bytes` of a single text."""
    check_text_bytes(len(text.encode()))


def check_text_bytes(num_bytes: int) -> None:
    """Refuse a request with too much text.

    Raises:
        RequestTooLargeError: it has more than 3 MiB of UTF-8.
    """
    if num_bytes > MAX_TEXT_BYTES:
        raise RequestTooLargeError(
            f"the request has {num_bytes} bytes of text, but at most {MAX_TEXT_BYTES} are allowed",
            limit=MAX_TEXT_BYTES,
            actual=num_bytes,
        )
