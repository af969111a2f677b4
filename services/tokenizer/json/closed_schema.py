"""Schemas of whole objects: what a schema allows when nothing but an object is asked for, and nothing unnamed."""

from __future__ import annotations

from services.tokenizer.json.json_values import JsonObject
from shared.request.grammar import GrammarError

# A schema without any of these describes its object by "properties" alone.
_OTHER_KEYWORDS = frozenset(
    {
        "$ref",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "enum",
        "if",
        "not",
        "oneOf",
        "patternProperties",
        "unevaluatedProperties",
    }
)


def closed_object(schema: JsonObject) -> JsonObject:
    """The schema of the objects alone that a schema allows, without additional properties unless it speaks of them.

    Raises:
        GrammarError: it allows no object.
    """
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise GrammarError('"type" must allow objects')
    is_closed = not _OTHER_KEYWORDS & schema.keys()
    return {**schema, "type": "object", **({"additionalProperties": False} if is_closed else {})}
