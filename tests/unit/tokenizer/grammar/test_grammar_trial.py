"""What a trial of a grammar detects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.tokenizer.grammar.grammar_trial import GrammarTrial
from shared.request.grammar import GrammarError, GrammarLibrary
from tests.support.models.tiny_tokenizer import IM_END_ID


@pytest.fixture(scope="module")
def trial(model_dir: Path) -> GrammarTrial:
    """Tries grammars in this process."""
    return GrammarTrial(GrammarLibrary(model_dir, (IM_END_ID,)))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'),
        ("json_schema", '{"type": "string", "format": "idn-email"}'),
        ("json_schema", '{"items": {"format": "color", "uniqueItems": false}, "description": "\\u0000"}'),
        ("regex", "ab"),
        ("regex", ".*a.{12}b"),
        ("grammar", 'start: e\ne: e "+" e | "(" e ")" | /[0-9]+/'),
        ("grammar", "start: <|im_start|> /[a-z]*/ <|im_end|>"),
        ("choices", json.dumps([f"choice {number}" for number in range(1024)])),
    ],
)
def test_a_working_grammar_passes(trial: GrammarTrial, kind: str, text: str) -> None:
    assert trial.run(kind, text) == trial.run(kind, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "https://example.com/schema"},
        {"type": "array", "uniqueItems": True},
        {"not": {"type": "string"}},
        {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
        {"type": "string", "pattern": "(?=a)"},
        {"unevaluatedProperties": False},
        {"if": {"type": "string"}, "then": {"maxLength": 3}},
        {"type": "text"},
        {"type": "string", "pattern": "^a$", "minLength": 2},
    ],
    ids=json.dumps,
)
def test_a_schema_that_a_grammar_cannot_guarantee_is_refused(trial: GrammarTrial, schema: object) -> None:
    with pytest.raises(GrammarError, match=r"Unimplemented|Unknown|supported|Invalid type|not present|Unsatisfiable"):
        trial.run("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"$ref": "#"}'),
        ("grammar", "start: a\na: b\nb: a"),
    ],
)
def test_a_grammar_that_matches_no_text_is_refused(trial: GrammarTrial, kind: str, text: str) -> None:
    with pytest.raises(GrammarError, match="no text fits"):
        trial.run(kind, text)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", '{"items":' * 2000 + "{}" + "}" * 2000, "nested too deep: more than 100 levels"),
        ("json_schema", '{"items":' * 101 + "{}" + "}" * 101, r"nested too deep: more than 100 levels, at \$\.items"),
        ("json_schema", json.dumps({"enum": ["é" * 600_000]}), "too large: at most 1048576 bytes"),
        ("grammar", "root ::= " + "(" * 2000, "recursion depth"),
        ("grammar", "start: " + "(" * 2000, "too deeply nested"),
        ("grammar", 'start: s\ns: s s | "a"', "Current row has"),
        ("grammar", 'start: s\ns: s s s | "a" | ""', "Current row has"),
        ("grammar", 'start: "a" start', "Too many items"),
        ("regex", "(((a{99}){99}){99}){99}b|c", "too many states"),
    ],
)
def test_a_grammar_that_costs_too_much_is_refused(trial: GrammarTrial, kind: str, text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        trial.run(kind, text)


LONG = "x y " * 400
AMBIGUOUS = 'b: b b | "a"'


@pytest.mark.parametrize(
    "grammar",
    [
        f'start: "{LONG}" b\n{AMBIGUOUS}',
        f'start: "{LONG}" b "{LONG}" | "{LONG}," b\n{AMBIGUOUS}',
        f'start: ("{LONG}b" | "{LONG}c") "{LONG}" b\n{AMBIGUOUS}',
        f"start: {' '.join(f'T{number}' for number in range(600))} b\n{AMBIGUOUS}\n"
        + "\n".join(f'T{number}: "t{number}."' for number in range(600)),
        f'start: %json {{"const": "{LONG}"}} b\n{AMBIGUOUS}',
        f"start: /[a-z]{{200}}/ b\n{AMBIGUOUS}",
        f"start: {'<|im_start|> ' * 200} b\n{AMBIGUOUS}",
        f'root ::= "{LONG}" b\nb ::= b b | "a"',
        f'start: "{"é😀" * 400}" b\n{AMBIGUOUS}',
    ],
)
def test_a_costly_body_is_found_after_a_long_literal(trial: GrammarTrial, grammar: str) -> None:
    with pytest.raises(GrammarError, match=r"Current row has|Too many items"):
        trial.run("grammar", grammar)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("choices", json.dumps([LONG * 8])),
        ("choices", json.dumps([LONG * 8 + end for end in "abc"])),
        ("json_schema", json.dumps({"const": list(range(1000))})),
        ("json_schema", json.dumps({"properties": {f"name{number}": {} for number in range(100)}})),
        ("grammar", f'start: "{LONG}"+'),
        ("grammar", "start: <|im_start|> start | /[a-z]/"),
    ],
)
def test_a_long_text_is_no_reason_to_refuse_a_form(trial: GrammarTrial, kind: str, text: str) -> None:
    trial.run(kind, text)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"minimum": NaN}', r"NaN is not a JSON value, at \$\.minimum"),
        ('{"properties": {"a": {"const": 1e999}}}', r"beyond 1\.8e308, at \$\.properties\.a\.const"),
        ('{"enum": [' + "9" * 5000 + "]}", r"5000 characters is beyond 1\.8e308, at \$\.enum\[0\]"),
        ('{"const": "\\ud800"}', r"lone surrogate is not valid text, at \$\.const"),
        ('{"type": "integer", "minimum": 100000000000000000000}', "at most 2\\*\\*53"),
        ('{"oneOf": [{"type": "integer"}, {"minimum": 2}]}', '"oneOf" is supported only where'),
    ],
)
def test_a_refused_schema_is_reported_with_its_error_and_no_library_internals(
    trial: GrammarTrial, schema: str, message: str
) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        trial.run("json_schema", schema)
    assert "coerce_one_of" not in str(caught.value)
    assert "limits." not in str(caught.value)
