"""Renders a conversation to its prompt. Pure, apart from the template."""

from __future__ import annotations

from dataclasses import dataclass

from services.tokenizer.chat.chat_template import ChatTemplate
from services.tokenizer.chat.conversation import Conversation
from services.tokenizer.text.control_tokens import ControlTokens, texts_in, unused_character
from shared.errors import InvalidRequestError, Violation


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered conversation."""

    text: str
    pieces: tuple[str | int, ...]
    """`text` as the ids of control tokens and the texts between them."""


def render_chat(template: ChatTemplate, control_tokens: ControlTokens, conversation: Conversation) -> RenderedChat:
    """Render a conversation; control tokens come only from the template. Raises as `ChatTemplate.render`.

    Where the last message is continued, the text ends with it: a mark after it shows where that is.
    """
    fields = template.fields(conversation)
    texts = [*texts_in(fields), template.text]
    mark, opens_turn = "", conversation.opens_turn and not conversation.continues_final
    if conversation.continues_final:
        mark = unused_character(texts)
        conversation = conversation.ending_with(mark)
        fields = template.fields(conversation)
    if not control_tokens.occur_in(texts[:-1]):
        text = _before(mark, template.render(fields, opens_turn=opens_turn))
        return RenderedChat(text, tuple(control_tokens.cut(text)))
    breaker = unused_character([*texts, mark])
    fields = template.fields(conversation, lambda value: control_tokens.broken(value, breaker))
    text = _before(mark, template.render(fields, opens_turn=opens_turn))
    pieces = (part if isinstance(part, int) else part.replace(breaker, "") for part in control_tokens.cut(text))
    return RenderedChat(text.replace(breaker, ""), tuple(pieces))


def _before(mark: str, text: str) -> str:
    if mark and mark not in text:
        description = "the chat template does not show what is to be continued"
        raise InvalidRequestError.from_violations(
            [Violation("chat.continue_final_message", "TEMPLATE_FAILED", description)]
        )
    return text[: text.rindex(mark)] if mark else text
