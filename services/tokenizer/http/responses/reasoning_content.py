"""What reasoning items have as `encrypted_content`: the reasoning itself, for clients that send back only this.

It is encoded, not encrypted: the client sees the reasoning beside it anyway.
"""

from __future__ import annotations

import base64
import binascii

_PREFIX = "lockstep-plain-1:"


def encode_reasoning(text: str) -> str:
    """A reasoning as `encrypted_content`."""
    return _PREFIX + base64.b64encode(text.encode()).decode()


def decode_reasoning(content: str) -> str | None:
    """The reasoning in an `encrypted_content`; None if another service has made it.

    Raises:
        ValueError: it is broken.
    """
    if not content.startswith(_PREFIX):
        return None
    try:
        return base64.b64decode(content.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise ValueError("is broken") from None
