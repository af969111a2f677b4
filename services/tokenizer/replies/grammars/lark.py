"""Builds a grammar in llguidance's dialect of Lark.

Source: llguidance, docs/syntax.md and docs/json_schema.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from services.tokenizer.json.ecma_regex import full_match_regex
from services.tokenizer.json.json_schema import STRICT_JSON, held_schema
from services.tokenizer.json.json_values import JsonObject, JsonValue
from shared.request.grammar import ANY_TOKENS

# JSON in the style of chat templates, which models were trained on.
_JSON_STYLE: JsonObject = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    **STRICT_JSON,
}
_ANY_TEXT = "(?s:.*)"
_SLASH = re.compile(r"(\\.)|/")


class LarkGrammar:
    """A grammar, built rule by rule."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        """`token_ids` has the added tokens, by their texts; the dialect distinguishes a token from its text."""
        self._token_ids = token_ids
        self._rules: list[str] = []

    def marker(self, text: str) -> str:
        """Markup: its token if there is one, otherwise its text."""
        if text not in self._token_ids:
            return self.literal(text)
        # Only these can be named.
        return text if text.startswith("<") and text.endswith(">") else f"<[{self._token_ids[text]}]>"

    def markup(self, text: str, token: str) -> str:
        """Markup of which a part, `token`, may be a token."""
        return f" {self.marker(token)} ".join(self.literal(part) for part in text.split(token))

    def literal(self, text: str) -> str:
        """A fixed text."""
        return literal(text)

    def rule(self, name: str, expression: str) -> str:
        """Add a rule; returns its name."""
        self._rules.append(f"{name}: {expression}")
        return name

    def json(self, schema: JsonValue) -> str:
        """The JSON that a schema describes.

        Raises:
            GrammarError: the schema asks for what no grammar can guarantee.
        """
        schema = held_schema(schema).schema
        if isinstance(schema, dict):
            schema = {**schema, "x-guidance": _JSON_STYLE}
        return self.rule(f"json_{len(self._rules)}", f"%json {json.dumps(schema)}")

    def text_until(self, marker: str, term: str = "", *, token: str = "", never: str = "") -> str:
        """Text that `term`, a terminal's expression, describes and that contains neither `marker` nor `never`, then the
        marker. Without a term it is any text.

        Only a part of the marker, `token`, may be a token.
        """
        number = len(self._rules)
        before, part, after = marker.partition(token) if token in self._token_ids else ("", marker, "")
        is_token = part in self._token_ids
        term = term or regex(_ANY_TEXT)
        if is_token and before:
            # A token ends the text before it, which is read as one.
            term = f"({term}) {literal(before)}"
        if never:
            term = f"({term}) & ~{regex(f'{_ANY_TEXT}{re.escape(never)}{_ANY_TEXT}')}"
        text = self.rule(f"TEXT_{number}", term)
        if is_token:
            return f"{text} {self.marker(part)} {self.literal(after) if after else ''}"
        return self.rule(f"text_{number}[suffix={self.literal(marker)}]", text).partition("[")[0]

    def source(self, start: str) -> str:
        """The grammar's source, with `start` as its start rule."""
        return "\n".join([f"start: {start}", *self._rules, ANY_TOKENS])


def literal(text: str) -> str:
    """A fixed text."""
    return json.dumps(text, ensure_ascii=False) if text else regex("(?:)")


def regex(pattern: str) -> str:
    """A terminal that a regular expression describes, in the library's syntax."""
    # Nothing between two slashes would begin a comment.
    return f"/{_slashes(pattern or '(?:)')}/"


def search_pattern(pattern: str) -> str:
    """A regex for texts in which `pattern` is found, as in JSON schemas; raises as `full_match_regex`."""
    return full_match_regex(pattern)


def length_pattern(min_length: JsonValue, max_length: JsonValue) -> str:
    """A regex for texts of that many characters; bounds other than whole numbers are ignored."""
    least, most = _whole(min_length), _whole(max_length)
    return f"(?s:.{{{least or 0},{'' if most is None else most}}})"


def _whole(bound: JsonValue) -> int | None:
    """A number such as 3.0 is whole in JSON Schema ("Core", section 4.2.3)."""
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not float(bound).is_integer():
        return None
    return int(bound)


def _slashes(pattern: str) -> str:
    return _SLASH.sub(lambda match: match[1] or r"\/", pattern).replace("\n", r"\n")
