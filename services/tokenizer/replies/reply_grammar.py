"""Grammars for replies that must call a tool in the family's format, or have a form; reasoning before it is free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from services.tokenizer.chat.conversation import Tool
from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.replies import deepseek_v3, glm4, harmony
from services.tokenizer.replies.lark import LarkGrammar, length_pattern, search_pattern
from services.tokenizer.replies.openings import THINK_MARKUP, Opening, ThinkMarkup
from shared.errors import InvalidRequestError, Violation
from shared.grammar import GrammarError

# Where a client's form goes; llguidance's syntax for a grammar of that name.
FORM = "@form"

# A schema without any of these describes its object by "properties" alone.
_OTHER_KEYWORDS = frozenset(
    {
        "$ref",
        "additionalProperties",
        "allOf",
        "anyOf",
        "if",
        "not",
        "oneOf",
        "patternProperties",
        "unevaluatedProperties",
    }
)


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """What the grammar of one reply depends on; it has tools, a form or both."""

    tools: Sequence[Tool]
    """One of them is called, unless the reply has the form instead."""
    one_call: bool
    """Whether there may be only one call; otherwise there may be more."""
    opening: Opening
    template_text: str
    token_texts: Collection[str]
    """The texts of the tokenizer's added tokens."""
    has_form: bool = False
    """Whether the reply may be of a form instead."""
    begins_at_once: bool = False
    """Whether there is no reasoning: if the prompt has opened it, its end comes first."""


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
    grammar = LarkGrammar(request.token_texts)
    calls, form = _calls(grammar, parser_name, request), FORM if request.has_form else ""
    if parser_name == "harmony":
        return _after_analysis(grammar, request, calls, form)
    return _after_thinking(grammar, request, calls, form, parser_name)


def _calls(grammar: LarkGrammar, parser_name: str, request: GrammarRequest) -> str:
    """The calls that a reply may have; empty without tools."""
    if not request.tools:
        return ""
    build = _BUILDERS.get(parser_name)
    if build is None:
        raise _refusal("the model has no known tool call format")
    try:
        return build(grammar, request)
    except GrammarError as error:
        raise _refusal(f"a tool's schema cannot be enforced: {error}", field="chat.tools") from None


def _hermes(grammar: LarkGrammar, request: GrammarRequest) -> str:
    calls = [
        f"{grammar.literal(_json_call(tool, 'arguments'))} {grammar.json(_arguments(tool))} {grammar.literal('}')}"
        for tool in request.tools
    ]
    begin, end = grammar.marker("<tool_call>"), grammar.marker("</tool_call>")
    newline = grammar.literal("\n")
    call = grammar.rule("call", f"{begin} {newline} ({' | '.join(calls)}) {newline} {end}")
    return _several(call, newline, request)


def _llama3_json(grammar: LarkGrammar, request: GrammarRequest) -> str:
    # Always one call: the chat template refuses replies with several.
    return " | ".join(
        f"{grammar.literal(_json_call(tool, 'parameters'))} {grammar.json(_arguments(tool))} {grammar.literal('}')}"
        for tool in request.tools
    )


def _deepseek_v3(grammar: LarkGrammar, request: GrammarRequest) -> str:
    separator, end = grammar.marker(deepseek_v3.SEPARATOR), grammar.marker(deepseek_v3.CALL_END)
    is_fenced = "```json" in request.template_text
    calls = []
    for tool in request.tools:
        arguments = grammar.json(_arguments(tool))
        if is_fenced:
            head, fence = grammar.literal(f"{tool.name}\n```json\n"), grammar.literal("\n```")
            calls.append(f"{grammar.literal('function')} {separator} {head} {arguments} {fence}")
        else:
            calls.append(f"{grammar.literal(tool.name)} {separator} {arguments}")
    call = grammar.rule("call", f"{grammar.marker(deepseek_v3.CALL_BEGIN)} ({' | '.join(calls)}) {end}")
    several = _several(call, grammar.literal("\n") if is_fenced else "", request)
    calls_begin, calls_end = grammar.marker(deepseek_v3.CALLS_BEGIN), grammar.marker(deepseek_v3.CALLS_END)
    return f"{calls_begin} {several} {calls_end}"


def _harmony(grammar: LarkGrammar, request: GrammarRequest) -> str:
    channel, message = grammar.marker(harmony.CHANNEL), grammar.marker(harmony.MESSAGE)
    kind = f"{grammar.marker(harmony.CONSTRAIN)} {grammar.literal('json')} {message}"
    # No end marker: the token that would end the message ends the reply.
    calls = [
        f"{grammar.literal(f'commentary to={harmony.FUNCTIONS}{tool.name} ')} {kind} {grammar.json(_arguments(tool))}"
        for tool in request.tools
    ]
    return f"{channel} ({' | '.join(calls)})"


def _glm4(grammar: LarkGrammar, request: GrammarRequest) -> str:
    begin, end = grammar.marker(glm4.CALL_BEGIN), grammar.marker(glm4.CALL_END)
    calls = [f"{grammar.literal(tool.name)} {_glm4_arguments(grammar, tool)}" for tool in request.tools]
    newline = grammar.literal("\n")
    call = grammar.rule("call", f"{begin} ({' | '.join(calls)}) {newline} {end}")
    return _several(call, newline, request)


def _glm4_arguments(grammar: LarkGrammar, tool: Tool) -> str:
    schema = tool.parameters
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if (
        not isinstance(properties, dict)
        or not isinstance(required, list)
        or _OTHER_KEYWORDS & schema.keys() - {"additionalProperties"}
    ):
        raise GrammarError("with this model, it must consist of plain properties")
    arguments = []
    for name, value in properties.items():
        pair = f"{_glm4_key(grammar, name)} {_glm4_value(grammar, value, schema)}"
        arguments.append(pair if name in required else f"({pair})?")
    return " ".join(arguments)


def _glm4_key(grammar: LarkGrammar, name: str) -> str:
    begin, end = grammar.marker(glm4.KEY_BEGIN), grammar.marker(glm4.KEY_END)
    newline = grammar.literal("\n")
    return f"{newline} {begin} {grammar.literal(name)} {end} {newline} {grammar.marker(glm4.VALUE_BEGIN)}"


def _glm4_value(grammar: LarkGrammar, schema: JsonValue, root: JsonObject) -> str:
    """Plain text where the parser reads it so, otherwise JSON."""
    end = grammar.marker(glm4.VALUE_END)
    if not (glm4.takes_text(schema, root) and isinstance(schema, dict) and not _OTHER_KEYWORDS & schema.keys()):
        definitions: JsonObject = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return f"{grammar.json({**definitions, **schema} if isinstance(schema, dict) else schema)} {end}"
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list):
        return f"({' | '.join(grammar.literal(str(choice)) for choice in choices)}) {end}"
    patterns = []
    if isinstance(pattern := schema.get("pattern"), str):
        patterns.append(search_pattern(pattern))
    min_length, max_length = schema.get("minLength"), schema.get("maxLength")
    if isinstance(min_length, int) or isinstance(max_length, int):
        patterns.append(length_pattern(min_length, max_length))
    return grammar.text_until(glm4.VALUE_END, *patterns)


def _several(call: str, between: str, request: GrammarRequest) -> str:
    return call if request.one_call else f"{call} ({between} {call})*"


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


def _json_call(tool: Tool, arguments: str) -> str:
    return f'{{"name": "{tool.name}", "{arguments}": '


def _arguments(tool: Tool) -> JsonObject:
    """The schema of the arguments, without additional ones unless it says otherwise."""
    if _OTHER_KEYWORDS & tool.parameters.keys():
        return tool.parameters
    return {**tool.parameters, "additionalProperties": False}


def _refusal(description: str, field: str = "chat.tool_mode") -> InvalidRequestError:
    return InvalidRequestError.from_violations([Violation(field, "GRAMMAR_INVALID", description)])


_BUILDERS: dict[str, Callable[[LarkGrammar, GrammarRequest], str]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "deepseek_v3": _deepseek_v3,
    "harmony": _harmony,
    "glm4": _glm4,
}
