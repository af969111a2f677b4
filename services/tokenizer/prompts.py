"""Turns every kind of prompt into token ids, off the event loop."""

from __future__ import annotations

from collections.abc import Sequence

from services.tokenizer.chat_template import ChatTemplate, Message
from services.tokenizer.encoder import Encoder
from services.tokenizer.request import Prompt, TokenIds, check_text
from shared.errors import TemplateFailedError


class PromptEncoder:
    """The model's tokenizer and, if it has one, its chat template."""

    def __init__(self, encoder: Encoder, template: ChatTemplate | None) -> None:
        self._encoder = encoder
        self._template = template

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self._template is not None

    async def encode(self, prompt: Prompt) -> TokenIds:
        """The ids of a prompt: [num_tokens].

        Raises:
            TemplateFailedError: a conversation, and the model has no template.
            InvalidRequestError: a conversation that its template does not take.
            RequestTooLargeError: a conversation whose rendered text is too large.
        """
        if isinstance(prompt, str):
            return await self.encode_text(prompt)
        if isinstance(prompt, tuple):
            _, token_ids = await self.render_chat(prompt)
            return token_ids
        return prompt

    async def encode_text(self, text: str) -> TokenIds:
        """The ids of plain text, with what the tokenizer's post-processor adds: [num_tokens]."""
        return await self._encoder.run(lambda: self._encoder.encode(text, add_special_tokens=True))

    async def render_chat(self, messages: Sequence[Message]) -> tuple[str, TokenIds]:
        """A conversation's text and its ids: [num_tokens]. The errors are those of `encode`."""
        template = self._template
        if template is None:
            raise TemplateFailedError("the model has no chat template")

        def render() -> tuple[str, TokenIds]:
            text = template.render(messages)
            check_text(text)
            # The template wrote every special token itself.
            return text, self._encoder.encode(text, add_special_tokens=False)

        return await self._encoder.run(render)

    async def decode(self, token_ids: TokenIds) -> str:
        """The text of ids, special tokens left out."""
        return await self._encoder.run(lambda: self._encoder.decode(token_ids))
