"""The grammars of answers that have a form, or must call a tool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.conversation import Conversation, Tool
from services.tokenizer.grammar.grammar_source import FormOptions
from services.tokenizer.grammar.shortest_text import shortest_json, too_long
from services.tokenizer.replies.openings import Opening
from services.tokenizer.request.checks import CheckedRequest, Prompt
from services.tokenizer.request.model import ServedModel
from shared.errors import Violation
from shared.request.limits import ModelLimits
from shared.request.request_fields import fields_under, raise_violations
from shared.request.sampling_params import NO_OPTIONS, SamplingParams

_FIELD = "structured_output"
# The JSON pointer to all of a schema.
_WHOLE = ("",)


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """What the cell is told of an answer's form. All empty for an answer without one."""

    grammar: str = ""
    reasoning_begin: tuple[int, ...] = ()
    reasoning_end: tuple[int, ...] = ()
    not_enforced: tuple[str, ...] = ()
    """JSON pointers to keywords of the schema that are not enforced."""

    def added_to(self, sampling: SamplingParams) -> SamplingParams:
        """`sampling` with it."""
        if not self.grammar:
            return sampling
        options = replace(
            sampling.options or NO_OPTIONS,
            grammar=self.grammar,
            reasoning_begin=self.reasoning_begin,
            reasoning_end=self.reasoning_end,
        )
        return replace(sampling, options=options)


NO_GRAMMAR = AnswerGrammar()


class AnswerGrammars:
    """Compiles the grammars of requests' answers."""

    def __init__(self, model: ServedModel, limits: Callable[[], ModelLimits]) -> None:
        """`limits` returns the current cell's."""
        self._model = model
        self._limits = limits

    async def of_texts(self, request: CheckedRequest) -> AnswerGrammar:
        """The grammar of answers that have the request's form from their first token, if there are any.

        Raises as `FormCompiler.compile`.
        """
        form = request.structured_output
        if form is None or all(
            request.form_of(prompt) is None or self._is_reply(request, prompt) for prompt in request.prompts
        ):
            return NO_GRAMMAR
        compiled = await self._model.form_compiler.compile(
            form, field=_FIELD, max_bytes=self._max_bytes(), options=_options_of(form)
        )
        return AnswerGrammar(compiled.grammar, not_enforced=compiled.not_held)

    async def of_reply(
        self, request: CheckedRequest, index: int, conversation: Conversation, opening: Opening, of_texts: AnswerGrammar
    ) -> AnswerGrammar:
        """The grammar of a reply to conversation `index`; `of_texts` if its form begins with the first token.

        Raises as `FormCompiler.compile` and `ReplyParsers.grammar`, and `InvalidRequestError` if the arguments of
        a tool that must be called fit no context.
        """
        form, parsers = request.form_of(conversation), self._model.reply_parsers
        if form is None and not conversation.callable_tools:
            return NO_GRAMMAR
        if form is not None and not self._is_reply(request, conversation):
            return of_texts
        has_form, at_once = form is not None, form is not None and form.begins_at_once
        # Slow if the schemas are large.
        with fields_under(request.field_prefix(index)):
            reply = await self._model.checking.run(
                partial(parsers.grammar, conversation, opening, has_form=has_form, begins_at_once=at_once)
            )
        spell = self._model.prompts.spell_markup
        begin, end = (spell(reply.begin), spell(reply.end)) if reply.end else ((), ())
        compiler, max_bytes, skipped = self._model.form_compiler, self._max_bytes(), (*begin, *end)
        if form is not None:
            compiled = await compiler.compile(
                form,
                field=_FIELD,
                max_bytes=max_bytes,
                options=_options_of(form),
                around=reply.source,
                skipped_ids=skipped,
            )
        else:
            field = f"{request.field_prefix(index)}chat.tools"
            await self._model.checking.run(partial(_check_arguments_fit, conversation.callable_tools, field, max_bytes))
            compiled = await compiler.compile_reply(reply.source, field=field, max_bytes=max_bytes, skipped_ids=skipped)
        # Ordinary tokens may spell the end in several ways, so that it could be missed.
        if len(end) != 1:
            begin, end = (), ()
        not_enforced = _WHOLE if form is None and request.structured_output is not None else compiled.not_held
        return AnswerGrammar(compiled.grammar, begin, end, not_enforced)

    def _is_reply(self, request: CheckedRequest, prompt: Prompt) -> bool:
        """Whether the answer to a prompt has parts, of which only the text has the form."""
        is_parsed = isinstance(prompt, Conversation) and self._model.reply_parsers.has_parser
        return is_parsed and not request.form.is_raw

    def _max_bytes(self) -> int:
        """The most bytes of any answer, by the context length and the KV cache."""
        limits = self._limits()
        return min(limits.context_length, limits.num_pool_tokens) * self._model.longest_token_bytes


def _options_of(form: tokenizer_pb2.StructuredOutput) -> FormOptions:
    return FormOptions(is_strict=form.strict or not form.HasField("strict"), is_compact=form.compact_json)


def _check_arguments_fit(tools: Sequence[Tool], field: str, max_bytes: int) -> None:
    name_to_size = {tool.name: shortest_json(tool.parameters) for tool in tools}
    raise_violations(
        [
            Violation(field, "GRAMMAR_TOO_COMPLEX", f"{name}: {too_long(size, max_bytes)}")
            for name, size in name_to_size.items()
            if size > max_bytes
        ]
    )
