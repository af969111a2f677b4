"""What a model's reply is made of, in the order in which the model wrote it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of the answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Text that the model thought before it answered; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A tool call, or more of its arguments.

    `index` counts the calls of a reply from 0. `id` and `name` are set in a call's first part and empty in the others.
    The arguments of all its parts, joined, are a JSON object once the call is complete.
    """

    index: int
    id: str
    name: str
    arguments: str


ReplyPart = TextPart | ReasoningPart | ToolCallPart
