"""Translates structured output forms into grammars in the library's form.

Must only run where a hostile grammar may use up time and memory, never on the event loop.

Source: llguidance, docs/syntax.md and docs/json_schema.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from services.tokenizer.grammar.schema_problem import place_of_problem, relaxed_schema
from services.tokenizer.json.closed_schema import closed_schema
from services.tokenizer.json.json_schema import MAX_SCHEMA_DEPTH, STRICT_JSON, HeldSchema, held_schema
from services.tokenizer.json.json_values import JsonObject, JsonValue, read_json
from shared.request.grammar import ANY_TOKENS, GrammarError, problem_of

# Enough for indentation. The limit is needed because a model that has begun a run of spaces may never end it: at 64, a
# small one spent all of its tokens on them.
_WITH_BLANKS: JsonObject = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,16}", **STRICT_JSON}
_COMPACT: JsonObject = {"whitespace_flexible": False, **STRICT_JSON}
_ANY_OBJECT = '{"type": "object"}'

_GBNF_ROOT = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FormOptions:
    """How a form of JSON is read."""

    is_strict: bool = True
    """Whether to refuse a schema that no grammar can hold; otherwise what can be held of it is."""
    is_compact: bool = False
    """Whether JSON has no blanks between its tokens; otherwise there may be 16 in a row."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A form in the library's dialect of Lark."""

    text: str
    not_held: tuple[str, ...] = ()
    """The keywords of a schema that the grammar does not hold, as JSON pointers."""


DEFAULT_OPTIONS = FormOptions()


def grammar_source(kind: str, text: str, options: FormOptions = DEFAULT_OPTIONS) -> GrammarSource:
    """Translate the field `kind` of `lockstep.v1.StructuredOutput`; choices come as a JSON list.

    A grammar that this service made has the kind `reply` and stays as it is.

    Raises:
        GrammarError: the form is malformed, or asks for what no grammar can guarantee. Most errors only show on
            compiling.
    """
    if kind == "reply":
        return GrammarSource(text)
    if kind in ("json_schema", "json_object"):
        held = _read_schema(text if kind == "json_schema" else _ANY_OBJECT, options)
        return GrammarSource(_json_grammar(held.schema, options), held.not_held)
    # At the end: a client counts the lines of its own grammar.
    return GrammarSource(f"{_KIND_TO_READER[kind](text)}\n{ANY_TOKENS}")


def grammar_around(form: str, around: str) -> str:
    """Put a form's grammar, from `grammar_source`, where `around`, in Lark, has `@form`; rules may have equal names."""
    return json.dumps({"grammars": [{"lark_grammar": around}, {"name": "form", "lark_grammar": form}]})


def place_of_schema_problem(text: str, options: FormOptions) -> str:
    """The JSON pointer to the part of a schema that the library refuses."""
    schema = _read_schema(text, options).schema
    place = place_of_problem(schema, lambda part: problem_of(_json_grammar(part, options)))
    # Its patterns are ours there.
    before, found, _ = place.partition("/patternProperties/")
    return before + found.removesuffix("/")


def _read_schema(text: str, options: FormOptions) -> HeldSchema:
    try:
        schema = read_json(text, max_depth=MAX_SCHEMA_DEPTH)
    except ValueError as error:
        raise GrammarError(f"not a JSON schema: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("a schema must be an object or true")
    schema = closed_schema(schema)
    if options.is_strict:
        return held_schema(schema)
    return relaxed_schema(schema, lambda part: problem_of(_json_grammar(part, options)))


def _json_grammar(schema: JsonValue, options: FormOptions) -> str:
    style = _COMPACT if options.is_compact else _WITH_BLANKS
    assert isinstance(schema, dict), "only parts of a schema may be true"
    # A text must have its properties in the order in which the schema lists them.
    return f"start: %json {json.dumps({**schema, 'x-guidance': style}, ensure_ascii=False)}\n{ANY_TOKENS}"


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
    "regex": _read_regex,
    "grammar": _read_lark_or_gbnf,
    "choices": _read_choices,
}
