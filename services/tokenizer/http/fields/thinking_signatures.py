"""The signatures of Anthropic's thinking blocks, which clients send back with the blocks.

A signature carries the reasoning that the client is not shown, so that it comes back and the next prompt has it. It is
no proof of origin: reasoning that comes back is the client's text, as all of its messages are, and a block of another
provider keeps the reasoning that it shows.
"""

from __future__ import annotations

from services.tokenizer.http.fields.carried_text import CarriedText

_SIGNATURES = CarriedText("lockstep1.", b"-_")


def make_signature(hidden: str) -> str:
    """The signature of a block; `hidden` is the reasoning that it does not show."""
    return _SIGNATURES.encode(hidden)


def hidden_thinking(signature: str) -> str:
    """What is in a signature; empty if it is not one of ours."""
    try:
        return _SIGNATURES.decode(signature) or ""
    except ValueError:
        return ""
