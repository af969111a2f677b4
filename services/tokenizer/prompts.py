"""Turns every kind of prompt into token ids, off the event loop."""

from __future__ import annotations

from collections.abc import Sequence

from services.tokenizer.chat_encoding import render_chat
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.conversation import Conversation
from services.tokenizer.encoder import Encoder
from services.tokenizer.request import Prompt, TokenIds
from services.tokenizer.text_size import check_text
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

    @property
    def template_text(self) -> str | None:
        """All that the chat template may write; None without one."""
        return None if self._template is None else self._template.text

    @property
    def added_tokens(self) -> frozenset[str]:
        """The texts that are one token whatever stands around them, once a template has written them."""
        return self._encoder.added_tokens

    @property
    def special_tokens(self) -> frozenset[str]:
        """The texts that decoding leaves out."""
        return self._encoder.special_tokens

    async def encode(self, prompt: Prompt) -> TokenIds:
        """The ids of a prompt: [num_tokens].

        Raises:
            TemplateFailedError: a conversation, and the model has no template.
            InvalidRequestError: a conversation that its template does not take.
            RequestTooLargeError: a conversation whose rendered text is too large.
        """
        if isinstance(prompt, str):
            return await self.encode_text(prompt)
        if isinstance(prompt, Conversation):
            _, token_ids = await self.render_chat(prompt)
            return token_ids
        return prompt

    async def encode_text(self, text: str) -> TokenIds:
        """The ids of plain text, with what the tokenizer's post-processor adds: [num_tokens]."""
        return await self._encoder.run(lambda: self._encoder.encode(text, add_special_tokens=True))

    async def render_chat(self, conversation: Conversation) -> tuple[str, TokenIds]:
        """A conversation's text and its ids: [num_tokens]. The errors are those of `encode`."""
        template = self._template
        if template is None:
            raise TemplateFailedError("the model has no chat template")

        def render() -> tuple[str, TokenIds]:
            rendered = render_chat(template, self._encoder.control_tokens, conversation)
            check_text(rendered.text)
            return rendered.text, self._encoder.encode_pieces(rendered.pieces)

        return await self._encoder.run(render)

    async def spell(self, words: Sequence[str]) -> list[list[int]]:
        """The ids of each of some words as they stand within a text."""
        return await self._encoder.run(lambda: [self._encoder.encode_pieces(["", word]).tolist() for word in words])

    async def decode(self, token_ids: TokenIds, *, skips_special_tokens: bool = True) -> str:
        """The text of ids, special tokens left out unless told otherwise."""
        return await self._encoder.run(
            lambda: self._encoder.decode(token_ids, skips_special_tokens=skips_special_tokens)
        )
