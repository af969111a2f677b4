"""Where a reply begins: how its prompt ends decides whether the model reasons first."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass


class Opening(enum.Enum):
    """What a reply begins with."""

    EITHER = "either"
    """Reasoning or the answer, as the model decides."""
    REASONING = "reasoning"
    """Reasoning that the prompt has opened."""
    ANSWER = "answer"
    """The answer: the prompt has closed the reasoning, or the model has none."""


@dataclass(frozen=True, slots=True)
class ThinkMarkup:
    """How a family marks reasoning."""

    begin: str
    end: str
    separator: str = ""
    """What its templates write between the end and the answer."""


# Markup by parser. Harmony's messages and families without reasoning are not marked like this.
THINK_MARKUP: dict[str, ThinkMarkup] = {
    "hermes": ThinkMarkup("<think>", "</think>", "\n\n"),
    "generic": ThinkMarkup("<think>", "</think>", "\n\n"),
    "deepseek_v3": ThinkMarkup("<think>", "</think>"),
    "deepseek_v32": ThinkMarkup("<think>", "</think>"),
    "kimi_k2": ThinkMarkup("<think>", "</think>"),
    "glm4": ThinkMarkup("<think>", "</think>", "\n"),
    "qwen3_coder": ThinkMarkup("<think>", "</think>", "\n\n"),
    "mistral": ThinkMarkup("[THINK]", "[/THINK]"),
}


def reasons(parser_name: str, template_text: str, token_texts: Collection[str]) -> bool:
    """Whether a model reasons: its template knows the markup, and its vocabulary (`token_texts`) has it."""
    if parser_name == "harmony":
        return True
    markup = THINK_MARKUP.get(parser_name)
    return markup is not None and markup.begin in template_text and markup.begin in token_texts


def opening_inside(parser_name: str, content: str) -> Opening:
    """The opening of what goes on with a message's content, or with its reasoning where that is empty.

    The content may also have opened reasoning itself.
    """
    if not content:
        return Opening.REASONING
    markup = THINK_MARKUP.get(parser_name)
    is_open = markup is not None and content.rfind(markup.begin) > content.rfind(markup.end)
    return Opening.REASONING if is_open else Opening.ANSWER


def opening_of(
    parser_name: str, prompt_text: str, *, template_text: str = "", token_texts: Collection[str] = ()
) -> Opening:
    """The opening of a reply after `prompt_text`, which ends with the assistant's turn opened."""
    if parser_name == "harmony":
        return Opening.EITHER
    markup = THINK_MARKUP.get(parser_name)
    if markup is None:
        return Opening.ANSWER
    prompt = prompt_text.rstrip()
    if prompt.endswith(markup.begin):
        return Opening.REASONING
    if prompt.endswith(markup.end) or not reasons(parser_name, template_text, token_texts):
        return Opening.ANSWER
    return Opening.EITHER
