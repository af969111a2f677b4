"""Grammars for replies that must call a tool in the family's format, or have a form; reasoning before it is free."""

from __future__ import annotations

from dataclasses import dataclass

from services.tokenizer.replies.families import harmony
from services.tokenizer.replies.grammars.call_grammars import CALL_GRAMMARS, GrammarRequest
from services.tokenizer.replies.grammars.lark import LarkGrammar
from services.tokenizer.replies.openings import THINK_MARKUP, Opening, ThinkMarkup
from shared.errors import InvalidRequestError, Violation
from shared.request.grammar import GrammarError

# Where a client's form goes; llguidance's syntax for a grammar of that name.
FORM = "@form"


@dataclass(frozen=True, slots=True)
class ReplyGrammar:
    """A grammar in llguidance's dialect of Lark, which names the client's by `FORM`."""

    source: str
    begin: str = ""
    """What opens free reasoning in a reply, and in the grammar; empty if the prompt has opened it."""
    end: str = ""
    """What closes it; empty without free reasoning."""


def reply_grammar(parser_name: str, request: GrammarRequest) -> ReplyGrammar:
    """Build a grammar in which arguments fit their schemas.

    Raises:
        InvalidRequestError: tools are to be called and there is no known format for that, or an argument's schema
            cannot be enforced in it.
    """
    grammar = LarkGrammar(request.token_ids)
    calls, form = _calls(grammar, parser_name, request), FORM if request.has_form else ""
    if parser_name == "harmony":
        return _after_analysis(grammar, request, calls, form)
    return _after_thinking(grammar, request, calls, form, parser_name)


def _calls(grammar: LarkGrammar, parser_name: str, request: GrammarRequest) -> str:
    """The calls that a reply may have; empty without tools."""
    if not request.tools:
        return ""
    build = CALL_GRAMMARS.get(parser_name)
    if build is None:
        raise _refusal("the model has no known tool call format")
    try:
        return build(grammar, request)
    except GrammarError as error:
        raise _refusal(f"a tool's schema cannot be enforced: {error}", field="chat.tools") from None


def _after_thinking(
    grammar: LarkGrammar, request: GrammarRequest, calls: str, form: str, parser_name: str
) -> ReplyGrammar:
    answer = _either(calls, form)
    markup = THINK_MARKUP.get(parser_name)
    if markup is None or request.opening is Opening.ANSWER:
        return ReplyGrammar(grammar.source(answer))
    separator = grammar.literal(markup.separator) if markup.separator else ""
    begin = grammar.marker(markup.begin)
    return _after_reasoning(grammar, request, markup, begin=begin, separator=separator, answer=answer)


def _after_analysis(grammar: LarkGrammar, request: GrammarRequest, calls: str, form: str) -> ReplyGrammar:
    channel, message, end = (grammar.marker(text) for text in (harmony.CHANNEL, harmony.MESSAGE, harmony.END))
    start = f"{grammar.marker(harmony.START)} {grammar.literal('assistant')}"
    if request.opening is Opening.ANSWER:
        # Inside the final message.
        return ReplyGrammar(grammar.source(_either(calls and f"{end} {start} {calls}", form)))
    answer = _either(calls, form and f"{channel} {grammar.literal('final')} {message} {form}")
    markup = ThinkMarkup(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}", harmony.END)
    begin = f"{channel} {grammar.literal('analysis')} {message}"
    return _after_reasoning(grammar, request, markup, begin=begin, separator=start, answer=answer)


def _after_reasoning(
    grammar: LarkGrammar, request: GrammarRequest, markup: ThinkMarkup, *, begin: str, separator: str, answer: str
) -> ReplyGrammar:
    """`begin`, `separator` and `answer` are parts of the grammar; `markup` has the texts."""
    is_open = request.opening is Opening.REASONING
    if request.begins_at_once:
        closing = f"{grammar.marker(markup.end)} {separator}" if is_open else ""
        return ReplyGrammar(grammar.source(f"{closing} {answer}"))
    reasoning = f"{grammar.text_until(markup.end)} {separator}"
    if is_open:
        return ReplyGrammar(grammar.source(f"{reasoning} {answer}"), end=markup.end)
    return ReplyGrammar(grammar.source(f"({begin} {reasoning})? {answer}"), markup.begin, markup.end)


def _either(*answers: str) -> str:
    return f"({' | '.join(filter(None, answers))})"


def _refusal(description: str, field: str = "chat.tool_mode") -> InvalidRequestError:
    return InvalidRequestError.from_violations([Violation(field, "GRAMMAR_INVALID", description)])
