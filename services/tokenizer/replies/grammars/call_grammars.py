"""Grammars of calls, in each family's own markup."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.tokenizer.chat.conversation import FUNCTIONS, Tool
from services.tokenizer.json.closed_schema import closed_arguments
from services.tokenizer.replies.families import deepseek_v3, deepseek_v32, glm4, harmony, kimi_k2, mistral, qwen3_coder
from services.tokenizer.replies.grammars.lark import LarkGrammar
from services.tokenizer.replies.grammars.untyped_grammars import ValueEnd, untyped_arguments
from services.tokenizer.replies.openings import Opening


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """What the grammar of one reply depends on; it has tools, a form or both."""

    tools: Sequence[Tool]
    """One of them is called, unless the reply has the form instead."""
    one_call: bool
    """Whether there may be only one call; otherwise there may be more."""
    opening: Opening
    template_text: str
    token_ids: Mapping[str, int]
    """Ids of the tokenizer's added tokens, by their texts."""
    has_form: bool = False
    """Whether the reply may be of a form instead."""
    begins_at_once: bool = False
    """Whether there is no reasoning: if the prompt has opened it, its end comes first."""


def _hermes(grammar: LarkGrammar, request: GrammarRequest) -> str:
    calls = _json_calls(grammar, request, "arguments")
    begin, end = grammar.marker("<tool_call>"), grammar.marker("</tool_call>")
    newline = grammar.literal("\n")
    call = grammar.rule("call", f"{begin} {newline} ({' | '.join(calls)}) {newline} {end}")
    return _several(call, newline, request)


def _generic(grammar: LarkGrammar, request: GrammarRequest) -> str:
    # Always one call: a model that was trained on none may repeat it without end.
    return _hermes(grammar, replace(request, one_call=True))


def _llama3_json(grammar: LarkGrammar, request: GrammarRequest) -> str:
    # Always one call: the chat template refuses replies with several.
    return " | ".join(_json_calls(grammar, request, "parameters"))


def _deepseek_v3(grammar: LarkGrammar, request: GrammarRequest) -> str:
    separator, end = grammar.marker(deepseek_v3.SEPARATOR), grammar.marker(deepseek_v3.CALL_END)
    is_fenced = "```json" in request.template_text
    calls = []
    for tool in request.tools:
        arguments = _json(grammar, tool)
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
        f"{grammar.literal(f'commentary to={harmony.FUNCTIONS}{tool.name} ')} {kind} {_json(grammar, tool)}"
        for tool in request.tools
    ]
    return f"{channel} ({' | '.join(calls)})"


def _kimi_k2(grammar: LarkGrammar, request: GrammarRequest) -> str:
    index, arguments = grammar.rule("INDEX", "/0|[1-9][0-9]{0,3}/"), grammar.marker(kimi_k2.ARGUMENTS)
    calls = [
        f"{grammar.literal(f'{FUNCTIONS}{tool.name}:')} {index} {arguments} {_json(grammar, tool)}"
        for tool in request.tools
    ]
    begin, end = grammar.marker(kimi_k2.CALL_BEGIN), grammar.marker(kimi_k2.CALL_END)
    several = _several(grammar.rule("call", f"{begin} ({' | '.join(calls)}) {end}"), "", request)
    return f"{grammar.marker(kimi_k2.CALLS_BEGIN)} {several} {grammar.marker(kimi_k2.CALLS_END)}"


def _glm4(grammar: LarkGrammar, request: GrammarRequest) -> str:
    begin, end = grammar.marker(glm4.CALL_BEGIN), grammar.marker(glm4.CALL_END)
    calls = [f"{grammar.literal(tool.name)} {_glm4_arguments(grammar, tool)}" for tool in request.tools]
    newline = _glm4_newline(grammar)
    call = grammar.rule("call", f"{begin} ({' | '.join(calls)}) {newline} {end}")
    return _several(call, newline, request)


def _glm4_newline(grammar: LarkGrammar) -> str:
    """As the model prefers: GLM-4.5 and 4.6 write one between all elements, later ones none."""
    newline = grammar.literal("\n")
    return f"{newline}?"


def _glm4_arguments(grammar: LarkGrammar, tool: Tool) -> str:
    newline = _glm4_newline(grammar)
    begin, end = grammar.marker(glm4.KEY_BEGIN), grammar.marker(glm4.KEY_END)

    def key(name: str, _: bool) -> str:
        return f"{newline} {begin} {name} {end} {newline} {grammar.marker(glm4.VALUE_BEGIN)}"

    return untyped_arguments(grammar, tool, key, ValueEnd(glm4.VALUE_END, glm4.VALUE_END, never=glm4.VALUE_END))


def _qwen3_coder(grammar: LarkGrammar, request: GrammarRequest) -> str:
    newline = grammar.literal("\n")
    begin, end = grammar.marker(qwen3_coder.CALL_BEGIN), grammar.marker(qwen3_coder.CALL_END)
    names = [grammar.literal(f"{qwen3_coder.FUNCTION_BEGIN}{tool.name}>\n") for tool in request.tools]
    calls = [f"{name} {_qwen3_coder_arguments(grammar, tool)}" for name, tool in zip(names, request.tools, strict=True)]
    function_end = grammar.literal(f"{qwen3_coder.FUNCTION_END}\n")
    call = grammar.rule("call", f"{begin} {newline} ({' | '.join(calls)}) {function_end} {end}")
    return _several(call, newline, request)


def _qwen3_coder_arguments(grammar: LarkGrammar, tool: Tool) -> str:
    def key(name: str, _: bool) -> str:
        tag_end = ">\n"
        return f"{grammar.literal(qwen3_coder.PARAMETER_BEGIN)} {name} {grammar.literal(tag_end)}"

    # The parser ends a value at its marker, with or without a line of its own.
    end = f"\n{qwen3_coder.PARAMETER_END}\n"
    return untyped_arguments(grammar, tool, key, ValueEnd(end, never=qwen3_coder.PARAMETER_END))


def _mistral(grammar: LarkGrammar, request: GrammarRequest) -> str:
    begin = grammar.marker(mistral.CALLS)
    if mistral.ARGUMENTS in request.template_text:
        separator = grammar.marker(mistral.ARGUMENTS)
        named = [f"{grammar.literal(tool.name)} {separator} {_json(grammar, tool)}" for tool in request.tools]
        return _several(grammar.rule("call", f"{begin} ({' | '.join(named)})"), "", request)
    listed = _json_calls(grammar, request, "arguments")
    several = _several(grammar.rule("call", f"({' | '.join(listed)})"), grammar.literal(", "), request)
    return f"{begin} {grammar.literal('[')} {several} {grammar.literal(']')}"


def _deepseek_v32(grammar: LarkGrammar, request: GrammarRequest) -> str:
    newline = grammar.literal("\n")
    names = [_dsml(grammar, f'{deepseek_v32.INVOKE_BEGIN} name="{tool.name}">\n') for tool in request.tools]
    calls = [
        f"{name} {_deepseek_v32_arguments(grammar, tool)}" for name, tool in zip(names, request.tools, strict=True)
    ]
    call = grammar.rule("call", f"({' | '.join(calls)}) {_dsml(grammar, deepseek_v32.INVOKE_END)} {newline}")
    begin, end = _dsml(grammar, deepseek_v32.CALLS_BEGIN), _dsml(grammar, deepseek_v32.CALLS_END)
    return f"{begin} {newline} {_several(call, '', request)} {end}"


def _deepseek_v32_arguments(grammar: LarkGrammar, tool: Tool) -> str:
    def key(name: str, is_text: bool) -> str:
        begin = _dsml(grammar, f'{deepseek_v32.PARAMETER_BEGIN} name="')
        tag_end = f'" string="{"true" if is_text else "false"}">'
        return f"{begin} {name} {grammar.literal(tag_end)}"

    token = deepseek_v32.DSML
    return untyped_arguments(grammar, tool, key, ValueEnd(f"{deepseek_v32.PARAMETER_END}\n", token, never=token))


def _dsml(grammar: LarkGrammar, text: str) -> str:
    return grammar.markup(text, deepseek_v32.DSML)


def _several(call: str, between: str, request: GrammarRequest) -> str:
    return call if request.one_call else f"{call} ({between} {call})*"


def _json_calls(grammar: LarkGrammar, request: GrammarRequest, arguments: str) -> list[str]:
    """One object for each tool; `arguments` is what the family calls that member."""
    heads = [grammar.literal(f'{{"name": "{tool.name}", "{arguments}": ') for tool in request.tools]
    return [
        f"{head} {_json(grammar, tool)} {grammar.literal('}')}" for head, tool in zip(heads, request.tools, strict=True)
    ]


def _json(grammar: LarkGrammar, tool: Tool) -> str:
    """The arguments as JSON."""
    return grammar.json(closed_arguments(tool.parameters))


CALL_GRAMMARS: dict[str, Callable[[LarkGrammar, GrammarRequest], str]] = {
    "hermes": _hermes,
    "generic": _generic,
    "llama3_json": _llama3_json,
    "deepseek_v3": _deepseek_v3,
    "harmony": _harmony,
    "kimi_k2": _kimi_k2,
    "glm4": _glm4,
    "qwen3_coder": _qwen3_coder,
    "mistral": _mistral,
    "deepseek_v32": _deepseek_v32,
}
"""Builders of a reply's calls, whose arguments fit their schemas, by parser. They raise `GrammarError`."""
