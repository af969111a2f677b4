"""The strings that a JSON schema allows, as plain text: a terminal of llguidance's dialect of Lark.

Source: llguidance, docs/syntax.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.json.schema_places import resolved
from services.tokenizer.json.text_formats import TEXT_FORMATS
from services.tokenizer.replies.grammars.lark import length_pattern, literal, regex, search_pattern
from shared.request.grammar import GrammarError

# How many references and combinations are followed.
_MAX_DEPTH = 32


def text_term(schema: JsonValue, root: JsonObject) -> str:
    """The terminal's expression; empty for any string. `schema` is part of `root`.

    Raises:
        GrammarError: no string fits, or the schema asks for what no grammar can guarantee.
    """
    term = _term(schema, root, 0)
    if term is None:
        raise GrammarError("no text fits")
    return term


def _term(node: JsonValue, root: JsonObject, depth: int) -> str | None:
    """None if no string fits."""
    if node is False:
        return None
    if not isinstance(node, dict):
        return ""
    if depth > _MAX_DEPTH:
        raise GrammarError("it is nested too deep, or refers to itself")
    kinds = node.get("type", "string")
    if "string" not in (kinds if isinstance(kinds, list) else [kinds]):
        return None
    terms = [*_own_terms(node), *_combined(node, root, depth)]
    return None if None in terms else " & ".join(f"({term})" for term in terms if term)


def _own_terms(node: JsonObject) -> Iterator[str | None]:
    """What a schema says of strings itself."""
    choices = [node["const"]] if "const" in node else node.get("enum")
    if isinstance(choices, list):
        yield " | ".join(literal(choice) for choice in choices if isinstance(choice, str)) or None
    if isinstance(pattern := node.get("pattern"), str):
        yield regex(search_pattern(pattern))
    least, most = node.get("minLength"), node.get("maxLength")
    if isinstance(least, int | float) or isinstance(most, int | float):
        yield regex(length_pattern(least, most))
    if isinstance(name := node.get("format"), str) and name in TEXT_FORMATS:
        yield regex(TEXT_FORMATS[name])


def _combined(node: JsonObject, root: JsonObject, depth: int) -> Iterator[str | None]:
    """What the schemas say that a schema combines."""
    if isinstance(reference := node.get("$ref"), str):
        if (target := resolved(root, reference)) is None:
            raise GrammarError("a reference leads nowhere")
        yield _term(target, root, depth + 1)
    for part in _list(node.get("allOf")):
        yield _term(part, root, depth + 1)
    if options := _list(node.get("anyOf")):
        yield _any_of([_term(option, root, depth + 1) for option in options])
    if options := _list(node.get("oneOf")):
        yield _one_of([_term(option, root, depth + 1) for option in options])


def _any_of(options: list[str | None]) -> str | None:
    possible = [option for option in options if option is not None]
    return "" if "" in possible else " | ".join(f"({option})" for option in possible) or None


def _one_of(options: list[str | None]) -> str | None:
    """The texts that exactly one of the options describes."""
    possible = [option or regex("(?s:.*)") for option in options if option is not None]
    alone = [
        " & ".join([f"({option})", *(f"~({other})" for j, other in enumerate(possible) if j != i)])
        for i, option in enumerate(possible)
    ]
    return " | ".join(f"({option})" for option in alone) or None


def _list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []
