"""Random schemas of a tool's arguments: types behind references and combinations, in an argument and at the root."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from services.tokenizer.json.text_formats import TEXT_FORMATS

Schema = dict[str, Any]

# Strings that are JSON of other types, or would be with their quotes.
_WORDS = ["5", "null", "true", "[1]", "{}", "red", '"red"', "-1.5", "None", " x", "a\nb"]

TEXTS: st.SearchStrategy[Schema] = st.one_of(
    st.lists(st.sampled_from(_WORDS), min_size=1, max_size=3, unique=True).map(lambda words: {"enum": words}),
    st.sampled_from(_WORDS).map(lambda word: {"type": "string", "const": word}),
    st.sampled_from(["^[0-9]{1,2}$", "^(true|null)$", "^a/b{1,2}$"]).map(lambda p: {"type": "string", "pattern": p}),
    st.sampled_from(sorted(TEXT_FORMATS)).map(lambda name: {"type": "string", "format": name}),
    st.just({"type": "string", "pattern": "^[0-9]*$", "minLength": 1, "maxLength": 3}),
)
_OTHERS: st.SearchStrategy[Schema] = st.sampled_from(
    [
        {"type": "integer", "minimum": 0, "maximum": 20},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": [1, "1", None, 2.5]},
        {"type": ["string", "number"], "enum": ["a", 1]},
        {"type": "array", "items": {"enum": ["1", 1]}, "maxItems": 2},
        {
            "type": "object",
            "properties": {"k": {"enum": ["</parameter>", "</arg_value>", "</｜DSML｜parameter>"]}},
            "required": ["k"],
            "additionalProperties": False,
        },
        {"$ref": "#/$defs/tree"},
    ]
)
_TREE: Schema = {
    "type": "object",
    "properties": {"v": {"enum": ["1", 2]}, "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
    "required": ["v"],
    "additionalProperties": False,
}
NAMES = ("c", "n", "x_1")


@st.composite
def values(draw: st.DrawFn, definitions: Schema) -> Schema:
    """A value's schema; what it refers to is added to `definitions`."""
    schema = draw(TEXTS | _OTHERS)
    for _ in range(draw(st.integers(0, 2))):
        match draw(st.sampled_from(["ref", "ref beside", "all", "any", "any null", "any text"])):
            case "ref":
                schema = _defined(definitions, schema)
            case "ref beside":
                schema = {**_defined(definitions, schema), "description": "d"}
            case "all":
                schema = {"allOf": [_defined(definitions, schema)], "title": "t"}
            case "any":
                schema = {"anyOf": [schema]}
            case "any null":
                schema = {"anyOf": [schema, {"type": "null"}], "default": None}
            case _:
                schema = {"anyOf": [schema, draw(TEXTS)]}
    return schema


@st.composite
def _objects(draw: st.DrawFn, definitions: Schema, names: tuple[str, ...] = NAMES) -> Schema:
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    properties = {name: draw(values(definitions)) for name in chosen}
    return {"type": "object", "properties": properties, "required": chosen[: draw(st.integers(0, len(chosen)))]}


@st.composite
def roots(draw: st.DrawFn) -> Schema:
    """A tool's schema."""
    definitions: Schema = {"tree": _TREE}
    root = draw(_objects(definitions))
    match draw(st.sampled_from(["plain", "ref", "all", "any", "one", "additional", "pattern", "nested"])):
        case "ref":
            root = _defined(definitions, root)
        case "all":
            root = {"allOf": [_defined(definitions, root), draw(_objects(definitions, ("d", "e")))]}
        case "any":
            root = {"anyOf": [{**root, "additionalProperties": False}, draw(_objects(definitions, ("d", "e")))]}
        case "one":
            kinds: list[Schema] = [
                {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "12"
            ]
            kinds[0]["properties"]["c"] = draw(TEXTS)
            root = {"type": "object", "oneOf": [_defined(definitions, kinds[0]), kinds[1]]}
        case "additional":
            root = {**root, "additionalProperties": draw(values(definitions))}
        case "pattern":
            by_pattern = {"^x_": draw(values(definitions)), "^s_": draw(TEXTS)}
            root = {"type": "object", "patternProperties": by_pattern, "additionalProperties": False}
        case "nested":
            root = {"$ref": "#/$defs/outer"}
            definitions["outer"] = {"allOf": [{"$ref": "#/$defs/inner"}]}
            definitions["inner"] = draw(_objects(definitions))
    return {**root, "$defs": definitions}


def _defined(definitions: Schema, schema: Schema) -> Schema:
    name = f"d{len(definitions)}"
    definitions[name] = schema
    return {"$ref": f"#/$defs/{name}"}
