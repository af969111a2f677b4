"""Schemas that are refused although the grammar library would accept them."""

from __future__ import annotations

import pytest

from services.tokenizer.json.json_schema import check_schema
from services.tokenizer.json.json_values import JsonObject
from shared.grammar import GrammarError


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "string", "pattern": r"^[^\x00-\x1f\"]+$"},
        {"type": "string", "pattern": r"^\[[\x00a]\\x01\n\t\f\u0041$"},
        {"type": "object", "patternProperties": {r"^[\x01\x02]a": True}},
        {"enum": ["a\nb\t\b\f\r", "é"]},
        {"properties": {"pattern": {"type": "string"}, "minProperties": {"type": "integer"}}},
        {"type": "integer", "minimum": -(2**53), "maximum": 2**53},
        {"enum": [2**64 - 1, -(2**63), 2**70]},
        {"minProperties": 1},
        {"minProperties": 3, "required": ["a", "b"]},
    ],
)
def test_what_the_library_handles_well_is_accepted(schema: JsonObject) -> None:
    check_schema({"properties": {"a": schema}, "anyOf": [schema]})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        ({"minProperties": 2}, "minProperties"),
        ({"minProperties": 4.0, "required": ["a", "b"]}, "minProperties"),
        ({"type": "integer", "minimum": 10**20}, '"minimum" 100000000000000000000 is not supported'),
        ({"type": ["null", "integer"], "exclusiveMaximum": -1e19}, "exclusiveMaximum.* at most 2\\*\\*53"),
        ({"const": 10**30}, r"10{19}… \(31 characters\) is not supported: whole numbers have at most 64 bits"),
        ({"enum": [[2**64 + 1]]}, "18446744073709551617 is not supported"),
        ({"const": "a\x00b"}, "control characters"),
        ({"enum": [{"a": ["\x7f"]}]}, "control characters"),
        ({"properties": {"a\x1f": {}}}, "control characters"),
        ({"pattern": r"a\x01b"}, "control characters"),
        ({"pattern": r"a\u001Fb"}, "control characters"),
        ({"pattern": r"[a-z]\u{7f}"}, "control characters"),
        ({"pattern": r"\[\\\cAb]"}, "control characters"),
        ({"pattern": r"x[\x01]"}, "control characters"),
        ({"pattern": "a\\vb"}, "control characters"),
        ({"patternProperties": {r"^\x00": {}}}, "control characters"),
    ],
)
def test_a_constraint_that_could_break_the_schema_is_refused_at_any_depth(schema: JsonObject, message: str) -> None:
    nested: list[JsonObject] = [schema, {"properties": {"a": schema}}, {"$defs": {"a": {"anyOf": [schema, True]}}}]
    for whole in nested:
        with pytest.raises(GrammarError, match=message):
            check_schema(whole)


@pytest.mark.parametrize("unit", ["[", "[a", "[\\x", "\\"])
def test_a_hostile_pattern_is_read_once(unit: str) -> None:
    # If it were read again from each character, it would take hours.
    check_schema({"type": "string", "pattern": unit * 200_000})
