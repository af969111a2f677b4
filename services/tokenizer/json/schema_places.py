"""Where in a JSON schema there are schemas.

Source: JSON Schema 2020-12, "Core", section 10 and appendix A; and the keywords of earlier drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote

from services.tokenizer.json.json_values import JsonValue

_ONE = frozenset(
    (
        *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"),
        *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
    )
)
_LISTS = frozenset(("allOf", "anyOf", "items", "oneOf", "prefixItems"))
_MAPS = frozenset(("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"))

_DRAFTS = {
    "https://json-schema.org/draft/2020-12/schema": 2020,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "http://json-schema.org/draft-07/schema": 7,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-04/schema": 4,
}
_MAX_POINTER_LENGTH = 200


@dataclass(frozen=True, slots=True)
class SchemaPlace:
    """A schema within another."""

    node: JsonValue
    pointer: str
    """Where it is, as the fragment of a URI (RFC 6901, section 6), cut if it is long."""
    draft: int
    """The draft that it is written in: 4, 6, 7, 2019 or 2020."""
    steps: tuple[str | int, ...] = ()
    """The names and indices that lead to it."""


def subschemas(place: SchemaPlace) -> Iterator[SchemaPlace]:
    """The schemas directly within a schema."""
    if not isinstance(place.node, dict):
        return
    for keyword, value in place.node.items():
        if isinstance(value, dict) and keyword in _MAPS:
            for name, schema in value.items():
                yield _within(place, schema, keyword, name)
        elif isinstance(value, list) and keyword in _LISTS:
            for index, schema in enumerate(value):
                yield _within(place, schema, keyword, index)
        elif keyword in _ONE:
            yield _within(place, value, keyword)


def draft_of(schema: JsonValue, default: int) -> int:
    """The draft that a schema names; `default` if it names none that is known."""
    name = schema.get("$schema") if isinstance(schema, dict) else None
    return _DRAFTS.get(name.rstrip("#"), default) if isinstance(name, str) else default


def referenced(root: JsonValue, reference: str) -> SchemaPlace | None:
    """The place that a reference names by a JSON pointer; None if it names none, or another document's."""
    _, _, fragment = reference.partition("#")
    if not fragment.startswith("/"):
        return None
    node = root
    steps: list[str | int] = []
    for name in _names(fragment):
        if isinstance(node, list) and name.isdecimal() and int(name[:9]) < len(node):
            steps.append(int(name[:9]))
            node = node[int(name[:9])]
        elif isinstance(node, dict) and name in node:
            steps.append(name)
            node = node[name]
        else:
            return None
    return SchemaPlace(node, pointer_into("#", *steps), draft_of(root, 2020), tuple(steps))


def resolved(root: JsonValue, reference: str) -> JsonValue:
    """What a reference names in the root by a JSON pointer; None for any other reference."""
    if reference in ("", "#"):
        return root
    place = referenced(root, reference) if reference[:1] == "#" else None
    return None if place is None else place.node


def pointer_into(pointer: str, *steps: str | int) -> str:
    """The pointer with more steps."""
    more = "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)
    return pointer if pointer.endswith("…") else _shortened(pointer + more)


def _names(fragment: str) -> list[str]:
    """The steps of a JSON pointer in a URI's fragment (RFC 6901, sections 4 and 6)."""
    return [step.replace("~1", "/").replace("~0", "~") for step in unquote(fragment).split("/")[1:]]


def _within(place: SchemaPlace, schema: JsonValue, *steps: str | int) -> SchemaPlace:
    pointer = pointer_into(place.pointer, *steps)
    return SchemaPlace(schema, pointer, draft_of(schema, place.draft), (*place.steps, *steps))


def _shortened(pointer: str) -> str:
    return pointer if len(pointer) <= _MAX_POINTER_LENGTH else pointer[:_MAX_POINTER_LENGTH] + "…"
