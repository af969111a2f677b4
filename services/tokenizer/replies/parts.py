"""The parts of a reply."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of the answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Reasoning before the answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A tool call, or more of its arguments."""

    index: int
    """The call's index in the reply, from 0."""
    id: str
    """Set in the call's first part, empty in the others."""
    name: str
    """Set where `id` is."""
    arguments: str
    """A complete call's arguments, joined, are a JSON object."""


ReplyPart = TextPart | ReasoningPart | ToolCallPart
