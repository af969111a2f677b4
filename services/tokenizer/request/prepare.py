"""Encodes prompts, spells bad words and compiles grammars."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from services.tokenizer.chat.conversation import Conversation
from services.tokenizer.chat.template_switches import unread_variables
from services.tokenizer.replies import ReplyParser
from services.tokenizer.request.answer_grammars import AnswerGrammar, AnswerGrammars
from services.tokenizer.request.bad_words import add_bad_words, spellings
from services.tokenizer.request.checks import AnswerForm, CheckedRequest, Prompt, TokenIds, resolve_request
from services.tokenizer.request.model import ServedModel
from services.tokenizer.request.resolved_request import ResolvedRequest
from shared.errors import Violation
from shared.request.limits import ModelLimits
from shared.request.request_fields import fields_under, raise_violations
from shared.request.sampling_params import NO_OPTIONS, SamplingParams


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One prompt, ready to be submitted."""

    request: ResolvedRequest
    echo: str
    """What each choice begins with; empty unless requested."""
    make_parser: Callable[[], ReplyParser | None] | None
    """Makes one choice's reply parser; None if replies are plain text."""
    not_enforced: tuple[str, ...] = ()
    """JSON pointers to keywords of the schema that are not enforced."""
    unread_variables: tuple[str, ...] = ()
    """The names of a chat's variables that have no effect."""


class RequestPreparer:
    """Does the slow work before a request is sent to the cell."""

    def __init__(self, model: ServedModel, limits: Callable[[], ModelLimits]) -> None:
        """`limits` returns the current cell's, which may change while requests wait."""
        self._model = model
        self._limits = limits
        self._grammars = AnswerGrammars(model, limits)

    async def prepare(self, request: CheckedRequest) -> list[PreparedPrompt]:
        """Prepare all prompts of a request, in order.

        Raises as `PromptEncoder.encode`, the methods of `AnswerGrammars` and `resolve_request`; `InvalidRequestError`
        also for bad words.
        """
        sampling = request.sampling
        if request.bad_words:
            sampling = await self._with_bad_words(request)
        of_texts = await self._grammars.of_texts(request)
        tasks = [
            asyncio.create_task(self._prepare(request, index, sampling, of_texts))
            for index in range(len(request.prompts))
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            # If one prompt is refused, the whole request is, and the other prompts' tokens are not needed.
            for task in tasks:
                task.cancel()

    async def _prepare(
        self, request: CheckedRequest, index: int, sampling: SamplingParams, of_texts: AnswerGrammar
    ) -> PreparedPrompt:
        prompt, prompts = request.prompts[index], self._model.prompts
        # What is cut may be longer than the context.
        max_tokens = self._limits().context_length if request.max_prompt_tokens is None else sys.maxsize
        make_parser: Callable[[], ReplyParser | None] | None = None
        grammar = of_texts
        unread: tuple[str, ...] = ()
        if isinstance(prompt, Conversation):
            with fields_under(request.field_prefix(index)):
                text, token_ids = await prompts.render_chat(prompt, max_tokens)
            unread = self._unread(prompt)
            opening = self._model.reply_parsers.opening(prompt, text)
            grammar = await self._grammars.of_reply(request, index, prompt, opening, of_texts)
            if not request.form.is_raw:
                make_parser = partial(
                    self._model.reply_parsers.make,
                    prompt,
                    opening,
                    skips_special_tokens=request.form.skips_special_tokens,
                    has_form=request.form_of(prompt) is not None,
                    has_grammar=bool(grammar.grammar),
                )
        else:
            token_ids = await prompts.encode(prompt, max_tokens)
        num_cut = token_ids.size - (request.max_prompt_tokens or token_ids.size)
        if num_cut > 0:
            token_ids = token_ids[num_cut:]
        # Encoding may have taken a while: check against the limits of the current cell.
        resolved = resolve_request(request, index, token_ids, grammar.added_to(sampling), self._limits())
        echo = ""
        if request.form.echoes:
            echo = await self._echo("" if num_cut > 0 else prompt, token_ids, request.form)
        return PreparedPrompt(resolved, echo, make_parser, grammar.not_enforced, unread)

    def _unread(self, conversation: Conversation) -> tuple[str, ...]:
        reasons = bool(self._model.reply_parsers.reasoning_parser)
        return tuple(unread_variables(conversation.variables, self._model.prompts.template_variables, reasons=reasons))

    async def _echo(self, prompt: Prompt, token_ids: TokenIds, form: AnswerForm) -> str:
        if isinstance(prompt, str) and prompt:
            return prompt
        skips = form.skips_special_tokens
        text = await self._model.prompts.decode(token_ids, skips_special_tokens=skips)
        # Half a character at the end belongs to the completion, which may complete it.
        held = self._model.texts.detokenizer(token_ids.data, skips_special_tokens=skips).flush()
        return text.removesuffix(held)

    async def _with_bad_words(self, request: CheckedRequest) -> SamplingParams:
        options = request.sampling.options or NO_OPTIONS
        spelled = await self._model.prompts.spell(spellings(request.bad_words))
        violations: list[Violation] = []
        runs = add_bad_words(options.bad_words, spelled, violations)
        raise_violations(violations)
        return replace(request.sampling, options=replace(options, bad_words=runs))
