"""Renders a conversation to its prompt. Pure, apart from the template."""

from __future__ import annotations

from dataclasses import dataclass

from services.tokenizer.chat.chat_template import ChatTemplate
from services.tokenizer.chat.conversation import Conversation
from services.tokenizer.text.control_tokens import ControlTokens, texts_in, unused_character


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered conversation."""

    text: str
    pieces: tuple[str | int, ...]
    """`text` as the ids of control tokens and the texts between them."""


def render_chat(template: ChatTemplate, control_tokens: ControlTokens, conversation: Conversation) -> RenderedChat:
    """Render a conversation; control tokens come only from the template. Raises as `ChatTemplate.render`."""
    fields = template.fields(conversation)
    texts = list(texts_in(fields))
    if not control_tokens.occur_in(texts):
        text = template.render(fields)
        return RenderedChat(text, tuple(control_tokens.cut(text)))
    breaker = unused_character([*texts, template.text])
    fields = template.fields(conversation, lambda value: control_tokens.broken(value, breaker))
    text = template.render(fields)
    pieces = (part if isinstance(part, int) else part.replace(breaker, "") for part in control_tokens.cut(text))
    return RenderedChat(text.replace(breaker, ""), tuple(pieces))
