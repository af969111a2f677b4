"""The signatures of Anthropic's thinking blocks, which clients send back with the blocks.

A signature carries the reasoning that the client is not shown, so that it comes back and the next prompt has it. It is
no proof of origin: reasoning that comes back is the client's text, as all of its messages are, and a block of another
provider keeps the reasoning that it shows.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "lockstep1."


def make_signature(hidden: str) -> str:
    """The signature of a block; `hidden` is the reasoning that it does not show."""
    return _MARK + base64.urlsafe_b64encode(hidden.encode()).decode()


def hidden_thinking(signature: str) -> str:
    """What is in a signature; empty if it is not one of ours."""
    if not signature.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_MARK), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
