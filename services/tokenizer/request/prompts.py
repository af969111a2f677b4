"""Turns prompts into token ids, off the event loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from services.tokenizer.chat.chat_encoding import RenderedChat, render_chat
from services.tokenizer.chat.chat_template import ChatTemplate
from services.tokenizer.chat.conversation import Conversation
from services.tokenizer.request.checks import Prompt, TokenIds
from services.tokenizer.scores.score_pair import ScorePair
from services.tokenizer.text.control_tokens import texts_in
from services.tokenizer.text.encoder import Encoder
from services.tokenizer.text.encoding_pools import MAX_WORK_S, EncodingPool, EncodingPools
from services.tokenizer.text_size import check_text
from shared.errors import InvalidRequestError, PromptTooLongError, TemplateFailedError


class PromptEncoder:
    """The model's tokenizer and its chat template, if any."""

    def __init__(self, encoder: Encoder, template: ChatTemplate | None, *, num_threads: int = 1) -> None:
        """Start `num_threads` threads for encoding short texts, and one for long ones; as many to wait for renders."""
        self._encoder = encoder
        self._template = template
        self._pools = EncodingPools(num_threads)
        # Apart from those that encode: these do nothing but wait.
        max_render_s = MAX_WORK_S if template is None else template.max_render_s
        self._rendering = EncodingPools(num_threads, "render", max_work_s=max_render_s)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self._template is not None

    @property
    def template_text(self) -> str | None:
        """`ChatTemplate.text`; None if there is no template."""
        return None if self._template is None else self._template.text

    @property
    def template_digest(self) -> str | None:
        """`ChatTemplate.digest`; None if there is no template."""
        return None if self._template is None else self._template.digest

    @property
    def num_ended_renders(self) -> Mapping[str, int]:
        """`Renderer.num_ended`; empty if there is no template."""
        return {} if self._template is None else self._template.num_ended_renders

    @property
    def template_variables(self) -> frozenset[str]:
        """The names of the variables that the chat template reads."""
        return frozenset() if self._template is None else self._template.variables

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template lists tools."""
        return self._template is not None and self._template.takes_tools

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """The ids of the added tokens by their texts; one that a template wrote is one token whatever surrounds it."""
        return self._encoder.added_tokens

    @property
    def special_tokens(self) -> frozenset[str]:
        """The special tokens' texts, which decoding skips."""
        return self._encoder.special_tokens

    @property
    def stuck(self) -> str | None:
        """What takes too long to end ever, in a few words; None if nothing does."""
        return self._pools.stuck or self._rendering.stuck

    def warm_up(self) -> None:
        """Start what renders conversations before the first one comes, without waiting; see `ChatTemplate.warm_up`."""
        if self._template is not None:
            self._template.warm_up(self._rendering.num_threads)

    def close(self) -> None:
        """Render no further conversation."""
        if self._template is not None:
            self._template.close()

    async def encode(self, prompt: Prompt, context_length: int) -> TokenIds:
        """Encode a prompt.

        Returns:
            [num_tokens], fewer than `context_length`; a prompt given as ids is returned unchecked.

        Raises:
            TemplateFailedError: the model has no chat template for a conversation.
            InvalidRequestError: the template rejects the conversation, or fails on it.
            RequestTooLargeError: the rendered text is too large.
            PromptTooLongError: it leaves no room for one more token; encoding stops as soon as that is known.
            QueueFullError: too much text is waiting to be encoded.
        """
        if isinstance(prompt, str):
            return await self._encode([prompt], context_length, add_special_tokens=True)
        if isinstance(prompt, Conversation):
            _, token_ids = await self.render_chat(prompt, context_length)
            return token_ids
        if isinstance(prompt, ScorePair):
            try:
                _, token_ids = await self.render_chat(prompt.conversation, context_length, template=prompt.template)
            except InvalidRequestError as error:
                # The messages that its violations name are none of the client's.
                violations = [replace(violation, field="pairs.documents") for violation in error.violations]
                raise InvalidRequestError.from_violations(violations) from None
            return token_ids
        return prompt

    async def encode_text(self, text: str, context_length: int, *, add_special_tokens: bool = True) -> TokenIds:
        """Encode plain text, with the post-processor's tokens unless told otherwise; raises as `encode`."""
        return await self._encode([text], context_length, add_special_tokens=add_special_tokens)

    async def render_chat(
        self, conversation: Conversation, context_length: int, *, template: ChatTemplate | None = None
    ) -> tuple[str, TokenIds]:
        """Render a conversation; returns its text and ids, [num_tokens]; raises as `encode`.

        A `template` takes the place of the model's.
        """
        template = template or self._template
        if template is None:
            raise TemplateFailedError("the model has no chat template")

        def render() -> RenderedChat:
            rendered = render_chat(template, self._encoder.control_tokens, conversation)
            check_text(rendered.text)
            return rendered

        num_bytes = _num_bytes(texts_in(template.fields(conversation)))
        pool = self._rendering.pool_for(num_bytes)
        with pool.admit(num_bytes):
            rendered = await pool.run(render)
        return rendered.text, await self._encode(rendered.pieces, context_length)

    async def spell(self, words: Sequence[str]) -> list[list[int]]:
        """Each word's token ids when it comes after other text."""
        return await self._pools.short.run(lambda: [self._encoder.encode_pieces(["", word]).tolist() for word in words])

    def spell_markup(self, text: str) -> tuple[int, ...]:
        """A short text's token ids where the model itself writes it, control tokens included."""
        return tuple(self._encoder.encode_pieces(["", *self._encoder.control_tokens.cut(text)]).tolist())

    async def decode(self, token_ids: TokenIds, *, skips_special_tokens: bool = True) -> str:
        """Decode token ids to text."""
        return await self._pools.pool_for(token_ids.nbytes).run(
            lambda: self._encoder.decode(token_ids, skips_special_tokens=skips_special_tokens)
        )

    async def _encode(
        self, pieces: Sequence[str | int], context_length: int, *, add_special_tokens: bool = False
    ) -> TokenIds:
        texts = [piece for piece in pieces if isinstance(piece, str)]
        runs = self._encoder.encode_in_parts(pieces, add_special_tokens=add_special_tokens)
        num_bytes = _num_bytes(texts)
        pool = self._pools.pool_for(num_bytes)
        with pool.admit(num_bytes):
            if pool is self._pools.short:
                token_ids: TokenIds = np.concatenate(await pool.run(partial(list, runs)))
                _check_length(token_ids.size, context_length)
                return token_ids
            _check_length(await pool.run(lambda: sum(map(self._encoder.least_tokens, texts))), context_length)
            return await _collect(pool, runs, context_length)


async def _collect(pool: EncodingPool, runs: Iterator[TokenIds], context_length: int) -> TokenIds:
    """Each run is encoded in its own turn of the pool; `PromptTooLongError` skips the rest."""
    collected: list[TokenIds] = []
    num_tokens = 0
    while (run := await pool.run(lambda: next(runs, None))) is not None:
        num_tokens += run.size
        _check_length(num_tokens, context_length)
        collected.append(run)
    return np.concatenate(collected)


def _check_length(num_tokens: int, context_length: int) -> None:
    if num_tokens >= context_length:
        raise PromptTooLongError(
            f"the text has at least {num_tokens} tokens, but the model's context length is {context_length}",
            limit=context_length - 1,
            actual=num_tokens,
        )


def _num_bytes(texts: Iterable[str]) -> int:
    return sum(len(text.encode()) for text in texts)
