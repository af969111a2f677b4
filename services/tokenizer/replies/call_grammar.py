"""Grammars for replies that must call a tool, in the family's call format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from services.tokenizer.chat.conversation import Tool
from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.replies import deepseek_v3, glm4, harmony
from services.tokenizer.replies.lark import LarkGrammar, length_pattern, search_pattern
from shared.errors import InvalidRequestError, Violation
from shared.grammar import GrammarError

_THINK_BEGIN, _THINK_END = "<think>", "</think>"

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
class CallRequest:
    """What the grammar of one reply depends on."""

    tools: Sequence[Tool]
    """At least one must be called."""
    one_call: bool
    """Whether there must be exactly one call; otherwise there may be more."""
    prompt_text: str
    template_text: str
    token_texts: Collection[str]
    """The texts of the tokenizer's added tokens."""


def tool_call_grammar(parser_name: str, request: CallRequest) -> str:
    """Build a grammar in llguidance's dialect of Lark: arguments fit their schemas, reasoning before the calls is free.

    Raises:
        InvalidRequestError: there is no known tool call format, or an argument's schema cannot be enforced in it.
    """
    build = _BUILDERS.get(parser_name)
    if build is None:
        raise _refusal("the model has no known tool call format")
    grammar = LarkGrammar(request.token_texts)
    try:
        return grammar.source(build(grammar, request))
    except GrammarError as error:
        raise _refusal(f"a tool's schema cannot be enforced: {error}", field="chat.tools") from None


def _hermes(grammar: LarkGrammar, request: CallRequest) -> str:
    calls = [
        f"{grammar.literal(_json_call(tool, 'arguments'))} {grammar.json(_arguments(tool))} {grammar.literal('}')}"
        for tool in request.tools
    ]
    begin, end = grammar.marker("<tool_call>"), grammar.marker("</tool_call>")
    newline = grammar.literal("\n")
    call = grammar.rule("call", f"{begin} {newline} ({' | '.join(calls)}) {newline} {end}")
    return _after_reasoning(grammar, request, _several(call, newline, request))


def _llama3_json(grammar: LarkGrammar, request: CallRequest) -> str:
    # Always one call: the chat template refuses replies with several.
    return " | ".join(
        f"{grammar.literal(_json_call(tool, 'parameters'))} {grammar.json(_arguments(tool))} {grammar.literal('}')}"
        for tool in request.tools
    )


def _deepseek_v3(grammar: LarkGrammar, request: CallRequest) -> str:
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
    return _after_reasoning(grammar, request, f"{calls_begin} {several} {calls_end}")


def _harmony(grammar: LarkGrammar, request: CallRequest) -> str:
    channel, message = grammar.marker(harmony.CHANNEL), grammar.marker(harmony.MESSAGE)
    kind = f"{grammar.marker(harmony.CONSTRAIN)} {grammar.literal('json')} {message}"
    # No end marker: the token that would end the message ends the reply.
    calls = [
        f"{grammar.literal(f'commentary to={harmony.FUNCTIONS}{tool.name} ')} {kind} {grammar.json(_arguments(tool))}"
        for tool in request.tools
    ]
    start = f"{grammar.marker(harmony.START)} {grammar.literal('assistant')}"
    analysis = f"{channel} {grammar.literal('analysis')} {message} {grammar.text_until(harmony.END)} {start}"
    return f"({analysis})? {channel} ({' | '.join(calls)})"


def _glm4(grammar: LarkGrammar, request: CallRequest) -> str:
    begin, end = grammar.marker(glm4.CALL_BEGIN), grammar.marker(glm4.CALL_END)
    calls = [f"{grammar.literal(tool.name)} {_glm4_arguments(grammar, tool)}" for tool in request.tools]
    newline = grammar.literal("\n")
    call = grammar.rule("call", f"{begin} ({' | '.join(calls)}) {newline} {end}")
    return _after_reasoning(grammar, request, _several(call, newline, request))


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
    if not glm4.takes_text(schema):
        definitions: JsonObject = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return f"{grammar.json({**definitions, **schema} if isinstance(schema, dict) else schema)} {end}"
    assert isinstance(schema, dict), "only an object can say that it takes text"
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


def _several(call: str, between: str, request: CallRequest) -> str:
    return call if request.one_call else f"{call} ({between} {call})*"


def _after_reasoning(grammar: LarkGrammar, request: CallRequest, calls: str) -> str:
    """Allow reasoning if the prompt has opened it or the model may begin with it."""
    newlines = grammar.literal("\n\n")
    prompt = request.prompt_text.rstrip()
    if prompt.endswith(_THINK_BEGIN):
        return f"{grammar.text_until(_THINK_END)} {newlines} {calls}"
    thinks = _THINK_BEGIN in request.template_text and _THINK_BEGIN in request.token_texts
    if not thinks or prompt.endswith(_THINK_END):
        return calls
    return f"({_THINK_BEGIN} {grammar.text_until(_THINK_END)} {newlines})? {calls}"


def _json_call(tool: Tool, arguments: str) -> str:
    return f'{{"name": "{tool.name}", "{arguments}": '


def _arguments(tool: Tool) -> JsonObject:
    """The schema of the arguments, without additional ones unless it says otherwise."""
    if _OTHER_KEYWORDS & tool.parameters.keys():
        return tool.parameters
    return {**tool.parameters, "additionalProperties": False}


def _refusal(description: str, field: str = "chat.tool_mode") -> InvalidRequestError:
    return InvalidRequestError.from_violations([Violation(field, "GRAMMAR_INVALID", description)])


_BUILDERS: dict[str, Callable[[LarkGrammar, CallRequest], str]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "deepseek_v3": _deepseek_v3,
    "harmony": _harmony,
    "glm4": _glm4,
}
