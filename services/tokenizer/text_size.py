"""How much text one request may carry."""

from __future__ import annotations

from shared.errors import RequestTooLargeError

MAX_TEXT_BYTES = 3 * 1024 * 1024


def check_text(text: str) -> None:
    """Refuse a text that is larger than one request's may be.

    Raises:
        RequestTooLargeError: above 3 MiB of UTF-8.
    """
    check_text_bytes(len(text.encode()))


def check_text_bytes(num_bytes: int) -> None:
    """Refuse a request by the bytes of all its text.

    Raises:
        RequestTooLargeError: above 3 MiB.
    """
    if num_bytes > MAX_TEXT_BYTES:
        raise RequestTooLargeError(
            f"the request has {num_bytes} bytes of text, at most {MAX_TEXT_BYTES} are taken",
            limit=MAX_TEXT_BYTES,
            actual=num_bytes,
        )
