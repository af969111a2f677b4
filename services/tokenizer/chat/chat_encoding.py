"""From a conversation to the text and the pieces that its prompt consists of. Pure, but for the template."""

from __future__ import annotations

from dataclasses import dataclass

from services.tokenizer.chat.chat_template import ChatTemplate
from services.tokenizer.chat.conversation import Conversation
from services.tokenizer.text.control_tokens import ControlTokens, texts_in, unused_character


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered conversation: its text, and that cut into ids of control tokens and the texts between them."""

    text: str
    pieces: tuple[str | int, ...]


def render_chat(template: ChatTemplate, control_tokens: ControlTokens, conversation: Conversation) -> RenderedChat:
    """Render a conversation in such a way that no control token is its author's.

    Raises:
        InvalidRequestError: the template refuses the conversation, or that makes it fail.
    """
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
