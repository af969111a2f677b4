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
from shared.grammar import ANY_TOKENS

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
        return json.dumps(text, ensure_ascii=False)

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

    def text_until(self, marker: str, *patterns: str, token: str = "", never: str = "") -> str:
        """Text that matches all `patterns` and contains neither `marker` nor `never`, then the marker.

        Only a part of the marker, `token`, may be a token.
        """
        number = len(self._rules)
        before, part, after = marker.partition(token) if token in self._token_ids else ("", marker, "")
        is_token = part in self._token_ids
        # A token ends the text before it, which is read as one.
        end = re.escape(before) if is_token else ""
        terms = [f"/{_slashes(f'(?:{pattern}){end}' if end else pattern)}/" for pattern in patterns or (_ANY_TEXT,)]
        if never:
            terms.append(f"~/{_slashes(f'(?s:.*){re.escape(never)}(?s:.*)')}/")
        text = self.rule(f"TEXT_{number}", " & ".join(terms))
        if is_token:
            return f"{text} {self.marker(part)} {self.literal(after) if after else ''}"
        return self.rule(f"text_{number}[suffix={self.literal(marker)}]", text).partition("[")[0]

    def source(self, start: str) -> str:
        """The grammar's source, with `start` as its start rule."""
        return "\n".join([f"start: {start}", *self._rules, ANY_TOKENS])


def search_pattern(pattern: str) -> str:
    """A regex for texts in which `pattern` is found, as in JSON schemas; raises as `full_match_regex`."""
    # Nothing between two slashes would begin a comment.
    return full_match_regex(pattern) or "(?:)"


def length_pattern(min_length: JsonValue, max_length: JsonValue) -> str:
    """A regex for texts of that many characters; bounds other than integers are ignored."""
    least = min_length if isinstance(min_length, int) else 0
    most = max_length if isinstance(max_length, int) else ""
    return f"(?s:.{{{least},{most}}})"


def _slashes(pattern: str) -> str:
    return _SLASH.sub(lambda match: match[1] or r"\/", pattern).replace("\n", r"\n")
