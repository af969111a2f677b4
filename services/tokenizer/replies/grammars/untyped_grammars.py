"""Grammars of arguments that are written one by one, each as plain text or as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from services.tokenizer.chat.conversation import Tool
from services.tokenizer.json.closed_schema import closed_schema
from services.tokenizer.json.json_values import JsonValue
from services.tokenizer.json.schema_parts import schema_part
from services.tokenizer.replies.calls.argument_forms import ArgumentForms
from services.tokenizer.replies.grammars.argument_lists import ArgumentList, OtherArguments, argument_lists
from services.tokenizer.replies.grammars.lark import LarkGrammar, regex, search_pattern
from services.tokenizer.replies.grammars.text_terms import text_term

# The names that a model may give to arguments that the schema does not name.
_NAMES = "[A-Za-z_][A-Za-z0-9_.-]{0,63}"


@dataclass(frozen=True, slots=True)
class ValueEnd:
    """What ends a value; see `LarkGrammar.text_until`."""

    end: str
    token: str = ""
    never: str = ""


def untyped_arguments(grammar: LarkGrammar, tool: Tool, key: Callable[[str, bool], str], end: ValueEnd) -> str:
    """All of a tool's arguments; empty if it has none.

    Args:
        key: Builds what is before a value, from the name's expression and whether the value is plain text.

    Raises:
        GrammarError: the schema asks for what no grammar can guarantee.
    """
    tool = replace(tool, parameters=closed_schema(tool.parameters))
    writer = _Writer(grammar, tool, key, end)
    lists = dict.fromkeys(writer.of_list(each) for each in argument_lists(tool.parameters))
    return next(iter(lists)) if len(lists) == 1 else f"({' | '.join(f'({each})' if each else '()' for each in lists)})"


class _Writer:
    """Builds the parts; equal ones are one rule."""

    def __init__(self, grammar: LarkGrammar, tool: Tool, key: Callable[[str, bool], str], end: ValueEnd) -> None:
        self._grammar = grammar
        self._root = tool.parameters
        self._forms = ArgumentForms(tool.parameters)
        self._key = key
        self._end = end
        self._known: dict[str, str] = {}

    def of_list(self, arguments: ArgumentList) -> str:
        pairs = []
        for each in arguments.arguments:
            pair = self._pair(self._grammar.literal(each.name), each.schema, is_text=self._forms.is_text(each.name))
            pairs.append(pair if each.is_required else f"({pair})?")
        others = [
            self._pair(self._names(each), each.schema, is_text=self._forms.is_text_by(each.schema))
            for each in arguments.others
        ]
        return " ".join([*pairs, f"({' | '.join(others)})*"] if others else pairs)

    def _names(self, others: OtherArguments) -> str:
        terms = [regex(_NAMES)]
        if others.pattern is not None:
            terms.append(regex(search_pattern(others.pattern)))
        terms += [f"~{regex(search_pattern(pattern))}" for pattern in others.excluded_patterns]
        if others.excluded_names:
            terms.append(f"~{regex('|'.join(re.escape(name) for name in others.excluded_names))}")
        return self._rule("NAME", " & ".join(terms))

    def _pair(self, name: str, schema: JsonValue, *, is_text: bool) -> str:
        return self._rule("pair", f"{self._key(name, is_text)} {self._value(schema, is_text=is_text)}")

    def _value(self, schema: JsonValue, *, is_text: bool) -> str:
        written = f"{is_text}{json.dumps(schema)}"
        if written not in self._known:
            self._known[written] = self._text(schema) if is_text else self._json(schema)
        return self._known[written]

    def _text(self, schema: JsonValue) -> str:
        end = self._end
        return self._grammar.text_until(end.end, text_term(schema, self._root), token=end.token, never=end.never)

    def _json(self, schema: JsonValue) -> str:
        grammar, end = self._grammar, self._end
        value = grammar.json(schema_part(schema, self._root))
        return f"{value} {grammar.markup(end.end, end.token) if end.token else grammar.marker(end.end)}"

    def _rule(self, name: str, expression: str) -> str:
        if expression not in self._known:
            self._known[expression] = self._grammar.rule(f"{name}_{len(self._known)}", expression)
        return self._known[expression]
