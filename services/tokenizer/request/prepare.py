"""Encodes prompts, spells bad words and compiles grammars."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.conversation import Conversation, Tool
from services.tokenizer.grammar.shortest_text import shortest_json, too_long
from services.tokenizer.replies import ReplyParser
from services.tokenizer.replies.call_grammar import ReplyGrammar
from services.tokenizer.replies.openings import Opening
from services.tokenizer.request.bad_words import add_bad_words, spellings
from services.tokenizer.request.checks import CheckedRequest, Prompt, TokenIds, resolve_request
from services.tokenizer.request.model import ServedModel
from services.tokenizer.request.request import Request
from shared.errors import Violation
from shared.limits import NO_OPTIONS, ModelLimits, SamplingParams
from shared.request_fields import raise_violations


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One prompt, ready to be submitted."""

    request: Request
    echo: str
    """What each choice begins with; empty unless requested."""
    make_parser: Callable[[], ReplyParser | None]
    """Makes one choice's reply parser; None if replies are plain text."""


class RequestPreparer:
    """Does the slow work before a request is sent to the cell."""

    def __init__(self, model: ServedModel, limits: Callable[[], ModelLimits]) -> None:
        """`limits` returns the current cell's, which may change while requests wait."""
        self._model = model
        self._limits = limits

    async def prepare(self, request: CheckedRequest) -> list[PreparedPrompt]:
        """Prepare all prompts of a request, in order.

        Raises as `PromptEncoder.encode`, `StructuredOutputs.compile`, `ReplyParsers.grammar` and `resolve_request`;
        `InvalidRequestError` also for bad words.
        """
        sampling = request.sampling
        if request.bad_words:
            sampling = await self._with_bad_words(request)
        tasks = [asyncio.create_task(self._prepare(request, index, sampling)) for index in range(len(request.prompts))]
        try:
            return await asyncio.gather(*tasks)
        finally:
            # If one prompt is refused, the whole request is, and the other prompts' tokens are not needed.
            for task in tasks:
                task.cancel()

    async def _prepare(self, request: CheckedRequest, index: int, sampling: SamplingParams) -> PreparedPrompt:
        prompt, prompts = request.prompts[index], self._model.prompts
        make_parser: Callable[[], ReplyParser | None] = _no_parser
        if isinstance(prompt, Conversation):
            text, token_ids = await prompts.render_chat(prompt, self._limits().context_length)
            opening = self._model.reply_parsers.opening(text)
            sampling = await self._with_reply_grammar(request, index, prompt, opening, sampling)
            if not request.form.is_raw:
                make_parser = partial(
                    self._model.reply_parsers.make,
                    prompt,
                    opening,
                    skips_special_tokens=request.form.skips_special_tokens,
                    has_form=request.structured_output is not None,
                )
        else:
            token_ids = await prompts.encode(prompt, self._limits().context_length)
            if request.structured_output is not None:
                sampling = await self._with_grammar(sampling, request.structured_output, "structured_output")
        # Encoding may have taken a while: check against the limits of the current cell.
        resolved = resolve_request(request, index, token_ids, sampling, self._limits())
        return PreparedPrompt(resolved, await self._echo(request, prompt, token_ids), make_parser)

    async def _echo(self, request: CheckedRequest, prompt: Prompt, token_ids: TokenIds) -> str:
        if not request.form.echoes:
            return ""
        if isinstance(prompt, str):
            return prompt
        skips = request.form.skips_special_tokens
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

    async def _with_reply_grammar(
        self,
        request: CheckedRequest,
        index: int,
        chat: Conversation,
        opening: Opening,
        sampling: SamplingParams,
    ) -> SamplingParams:
        """With the grammar of a reply that has a form or must call a tool, if it does."""
        form, parsers = request.structured_output, self._model.reply_parsers
        if form is None and not chat.callable_tools:
            return sampling
        if form is not None and (request.form.is_raw or not parsers.has_parser):
            return await self._with_grammar(sampling, form, "structured_output")
        field = f"{request.field_prefix(index)}chat.tools"
        # Slow if the schemas are large.
        grammar = await asyncio.to_thread(
            parsers.grammar,
            chat,
            opening,
            has_form=form is not None,
            begins_at_once=form is not None and form.begins_at_once,
        )
        if form is None:
            await asyncio.to_thread(_check_arguments_fit, chat.callable_tools, field, self._max_bytes())
            calls = tokenizer_pb2.StructuredOutput(grammar=grammar.source)
            return await self._with_grammar(sampling, calls, field, reasoning=grammar)
        return await self._with_grammar(sampling, form, "structured_output", around=grammar.source, reasoning=grammar)

    async def _with_grammar(
        self,
        sampling: SamplingParams,
        form: tokenizer_pb2.StructuredOutput,
        field: str,
        *,
        around: str = "",
        reasoning: ReplyGrammar | None = None,
    ) -> SamplingParams:
        """`around` surrounds the form; `reasoning` says what may come before it."""
        begin: tuple[int, ...] = ()
        end: tuple[int, ...] = ()
        if reasoning is not None and reasoning.end:
            begin, end = await self._model.prompts.spell_markup([reasoning.begin, reasoning.end])
        grammar = await self._model.structured_outputs.compile(
            form, field=field, max_bytes=self._max_bytes(), around=around, skipped_ids=(*begin, *end)
        )
        options = replace(sampling.options or NO_OPTIONS, grammar=grammar)
        # Ordinary tokens may spell the end in several ways, so that it could be missed.
        if len(end) == 1:
            options = replace(options, reasoning_begin=begin, reasoning_end=end)
        return replace(sampling, options=options)

    def _max_bytes(self) -> int:
        """The most bytes of any answer, by the context length and the KV cache."""
        limits = self._limits()
        return min(limits.context_length, limits.num_pool_tokens) * self._model.longest_token_bytes


def _check_arguments_fit(tools: Sequence[Tool], field: str, max_bytes: int) -> None:
    name_to_size = {tool.name: shortest_json(tool.parameters) for tool in tools}
    raise_violations(
        [
            Violation(field, "GRAMMAR_TOO_COMPLEX", f"{name}: {too_long(size, max_bytes)}")
            for name, size in name_to_size.items()
            if size > max_bytes
        ]
    )


def _no_parser() -> None:
    """For replies that are plain text."""
