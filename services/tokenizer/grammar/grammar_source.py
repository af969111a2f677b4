"""Translates structured output forms into grammars in the library's form.

Must only run where a hostile grammar may use up time and memory, never on the event loop.

Source: llguidance, docs/syntax.md and docs/json_schema.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from services.tokenizer.json.json_schema import MAX_SCHEMA_DEPTH, STRICT_JSON, check_schema
from services.tokenizer.json.json_values import JsonObject, read_json
from shared.grammar import ANY_TOKENS, GrammarError

# Enough for indentation. The limit is needed because a model that has begun a run of spaces may never end it: at 64, a
# small one spent all of its tokens on them.
_JSON_STYLE: JsonObject = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,16}", **STRICT_JSON}
_ANY_OBJECT = '{"type": "object"}'

_GBNF_ROOT = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def grammar_source(kind: str, text: str) -> str:
    """Translate the field `kind` of `lockstep.v1.StructuredOutput`; choices come as a JSON list.

    Raises:
        GrammarError: the form is malformed, or asks for what no grammar can guarantee. Most errors only show on
            compiling.
    """
    # At the end: a client counts the lines of its own grammar.
    return f"{_KIND_TO_READER[kind](text)}\n{ANY_TOKENS}"


def _read_json_schema(text: str) -> str:
    try:
        schema = read_json(text, max_depth=MAX_SCHEMA_DEPTH)
    except ValueError as error:
        raise GrammarError(f"not a JSON schema: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("a schema must be an object or true")
    check_schema(schema)
    # A text must have its properties in the order in which the schema lists them.
    return "start: %json " + json.dumps({**schema, "x-guidance": _JSON_STYLE}, ensure_ascii=False)


def _read_regex(text: str) -> str:
    return f"start: /{regex_to_lark(text, '')}/"


def _read_lark_or_gbnf(text: str) -> str:
    if _GBNF_ROOT.search(text):
        return _read_gbnf(text)
    if text.lstrip().startswith("{"):
        # The library would read it as its own JSON form.
        raise GrammarError("a grammar begins with a rule, not with a brace")
    return text


def _read_gbnf(text: str) -> str:
    try:
        return gbnf_to_lark(_GBNF_ESCAPE.sub(_write_out, text))
    except Exception as error:  # noqa: BLE001 - the library raises bare exceptions
        raise GrammarError(f"invalid GBNF: {error}") from None


def _write_out(escape: re.Match[str]) -> str:
    r"""Write out a \u or \U escape, which the library misreads."""
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    number = int(digits, 16)
    return f"\\x{number:02x}" if number < 0x80 else chr(number)


def _read_choices(text: str) -> str:
    # A single terminal: as rules, each choice would count as a separate parse. Everything but ASCII is escaped, since
    # the library does not accept every character literally.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in json.loads(text))


_KIND_TO_READER: Mapping[str, Callable[[str], str]] = {
    "json_schema": _read_json_schema,
    "regex": _read_regex,
    "grammar": _read_lark_or_gbnf,
    "choices": _read_choices,
    "json_object": lambda _: _read_json_schema(_ANY_OBJECT),
}
