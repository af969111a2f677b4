"""The limit on the text of one request."""

from __future__ import annotations

from shared.errors import RequestTooLargeError

MAX_TEXT_BYTES = 3 * 1024 * 1024


def check_text(text: str) -> None:
    """Refuse a text that exceeds the limit on its own.

    Raises:
        RequestTooLargeError: it is above 3 MiB of UTF-8.
    """
    check_text_bytes(len(text.encode()))


def check_text_bytes(num_bytes: int) -> None:
    """Refuse a request whose texts together have too many bytes of UTF-8.

    Raises:
        RequestTooLargeError: they have more than 3 MiB.
    """
    if num_bytes > MAX_TEXT_BYTES:
        raise RequestTooLargeError(
            f"the request has {num_bytes} bytes of text, but at most {MAX_TEXT_BYTES} are allowed",
            limit=MAX_TEXT_BYTES,
            actual=num_bytes,
        )
