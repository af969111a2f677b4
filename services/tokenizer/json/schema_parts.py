"""A part of a schema as a schema of its own, with what it refers to."""

from __future__ import annotations

import copy

from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.json.schema_places import SchemaPlace, subschemas

_DEFINITIONS = ("$defs", "definitions")
# Where the root goes if a part refers to other places of it than its definitions.
_ROOT = "root"


def schema_part(schema: JsonValue, root: JsonObject) -> JsonValue:
    """A schema that is part of `root`, or made of such parts, on its own."""
    references = [node["$ref"] for node in _referring(schema)]
    if not isinstance(schema, dict) or not references:
        return schema
    definitions: JsonObject = {name: root[name] for name in _DEFINITIONS if name in root}
    references += [node["$ref"] for node in _referring(definitions)]
    is_far = any(isinstance(each, str) and not each.startswith(("#/$defs/", "#/definitions/")) for each in references)
    if not is_far and not any(name in schema for name in _DEFINITIONS):
        return {**schema, **definitions}
    part, whole = copy.deepcopy(schema), copy.deepcopy(root)
    for node in (*_referring(part), *_referring(whole)):
        if isinstance(reference := node["$ref"], str) and reference[:1] in ("#", ""):
            node["$ref"] = f"#/$defs/{_ROOT}{reference[1:]}"
    return {**part, "$defs": {_ROOT: whole}}


def _referring(root: JsonValue) -> list[JsonObject]:
    """The schemas with a reference."""
    found: list[JsonObject] = []
    places, seen = [SchemaPlace(root, "#", 2020)], set()
    while places:
        place = places.pop()
        if isinstance(place.node, dict) and id(place.node) not in seen:
            seen.add(id(place.node))
            found += [place.node] if "$ref" in place.node else []
            places += subschemas(place)
    return found
