"""How the value of an argument is written where a family writes arguments one by one: as plain text, or as JSON.

The one place that decides it, by the tool's schema: parsers and grammars ask here.
"""

from __future__ import annotations

from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.json.schema_types import named_properties, property_types, types_of

TEXT = frozenset({"string"})


class ArgumentForms:
    """The forms of one tool's arguments."""

    def __init__(self, parameters: JsonObject) -> None:
        """`parameters` is the JSON schema of the arguments."""
        self._parameters = parameters
        self._known: dict[str, frozenset[str] | None] = {}
        self._names: frozenset[str] | None = None

    def types(self, name: str) -> frozenset[str] | None:
        """The types of an argument, in JSON Schema's words; None if nothing is known of them."""
        if name not in self._known:
            self._known[name] = property_types(self._parameters, name)
        return self._known[name]

    def is_named(self, name: str) -> bool:
        """Whether the schema names the argument."""
        if self._names is None:
            self._names = named_properties(self._parameters)
        return name in self._names

    def is_text(self, name: str) -> bool:
        """Whether the value is plain text: it can only be a string. Otherwise it is JSON."""
        return self.types(name) == TEXT

    def is_text_by(self, schema: JsonValue) -> bool:
        """As `is_text`, for all arguments of which `schema`, a part of the tool's, is the only one."""
        return types_of(schema, self._parameters) == TEXT
