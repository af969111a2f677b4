"""The texts that a client's form allows once it is a grammar."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.tokenizer.grammar.grammar_source import grammar_source
from shared.request.grammar import GrammarError, GrammarLibrary
from tests.support.models.tiny_tokenizer import IM_END_ID

AWKWARD_TEXTS = [
    "a",
    "ab",
    "a\nb",
    '"q"',
    "back\\slash",
    "é😀",
    "\x00",
    "\x7f\x80",
    "\u2028",
    "a|b",
    " c ",
    "{",
    "\r\n",
]

GBNF = r"""
root  ::= "(" word ("," word)* ")" [\u0021\u4e00-\u9fff]?   # a comment
word  ::= [a-z]{2,3} | "\"" [^"\\\x00-\x1f]* "\""
"""
LARK = """
start: "(" word ("," word)* ")"
word: WORD | NUMBER
WORD: /[a-z]{2,3}/
NUMBER: /[0-9]+/
"""


@pytest.fixture(scope="module")
def library(model_dir: Path) -> GrammarLibrary:
    """The library with the tiny tokenizer."""
    return GrammarLibrary(model_dir, (IM_END_ID,))


def fits(library: GrammarLibrary, grammar: str, text: str) -> bool:
    """Whether the grammar allows the text."""
    matcher = library.compile(grammar)
    token_ids = library.tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("regex", "a/b+", ["a/b", "a/bbb"], ["a/", "xa/b", "a/b\n"]),
        ("regex", r"^\d{2}$|é", ["12", "é"], ["123", "1"]),
        ("grammar", LARK, ["(ab,12)", "(abc)"], ["()", "(a)", "(ab,)"]),
        ("grammar", GBNF, ["(ab)", '(abc,"x y")!', "(ab)好"], ["(a)", '(ab")', "(ab)?", "(ab)x"]),
        ("grammar", 'root ::= [a-c]+\n', ["abc"], ["abd"]),
        ("json_object", "", ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a"}']),
        ("json_schema", "true", ["1", "[]", '{"a": "b"}'], ["", "x"]),
        ("json_schema", "{}", ["1", "[]", '{"a": "b"}'], ["", "x"]),
    ],
)  # fmt: skip
def test_a_form_allows_what_it_describes(
    library: GrammarLibrary, kind: str, source: str, good: list[str], bad: list[str]
) -> None:
    grammar = grammar_source(kind, source).text
    assert [text for text in good if not fits(library, grammar, text)] == []
    assert [text for text in bad if fits(library, grammar, text)] == []


def test_choices_allow_each_text_literally(library: GrammarLibrary) -> None:
    grammar = grammar_source("choices", json.dumps(AWKWARD_TEXTS)).text
    assert [text for text in AWKWARD_TEXTS if not fits(library, grammar, text)] == []
    assert [text for text in ("", "abc", "a b", "aa") if fits(library, grammar, text)] == []


def test_json_may_be_indented_up_to_a_limit(library: GrammarLibrary) -> None:
    grammar = grammar_source("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}').text
    assert fits(library, grammar, '{\n        "a" :\t1\n}')
    assert not fits(library, grammar, "{" + " " * 17 + '"a": 1}')


@pytest.mark.parametrize("name", [r"\u0061", r"a\u000a"])
def test_a_property_cannot_be_written_with_escapes(library: GrammarLibrary, name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "a\n": {"type": "string"}}}
    grammar = grammar_source("json_schema", json.dumps({**schema, "additionalProperties": {"type": "integer"}})).text
    assert fits(library, grammar, '{"a": "x", "b": 1}')
    assert not fits(library, grammar, '{"' + name + '": 1}')


@pytest.mark.parametrize(
    ("least", "required", "is_fine"), [(0, 0, True), (1, 0, True), (2, 0, False), (2, 1, True), (3, 1, False)]
)
def test_min_properties_is_supported_only_where_no_name_can_be_counted_twice(
    library: GrammarLibrary, least: int, required: int, is_fine: bool
) -> None:
    schema = {"type": "object", "minProperties": least, "required": [f"r{number}" for number in range(required)]}
    source = json.dumps({"items": [{"a": schema}], "properties": {"x": schema}})
    if not is_fine:
        with pytest.raises(GrammarError, match='"minProperties" is supported'):
            grammar_source("json_schema", source)
        return
    grammar = grammar_source("json_schema", json.dumps(schema)).text
    pairs = [f'"r{number}": 1' for number in range(required)] + ['"a": 1', '"a": 2']
    for count in range(len(pairs) + 1):
        text = "{" + ", ".join(pairs[:count]) + "}"
        num_distinct = len(json.loads(text))
        assert not fits(library, grammar, text) or num_distinct >= max(least, required)


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("json_schema", "{", "not a JSON schema"),
        ("json_schema", "[]", "an object or true"),
        ("json_schema", "false", "an object or true"),
        ("json_schema", '{"x-guidance": {"lenient": true}}', '"x-guidance" is not allowed'),
        ("json_schema", '{"items": {"x-guidance": {}}}', '"x-guidance" is not allowed'),
        ("grammar", 'root ::= "a', "invalid GBNF: Unexpected end of input"),
        ("grammar", "root ::= other", "Rule 'other' not found"),
        ("grammar", r'root ::= "\U7fffffff"', "invalid GBNF"),
        ("grammar", ' {"grammars": [{"lark_grammar": "start: /a/"}]}', "begins with a rule"),
    ],
)
def test_an_unreadable_form_is_refused(kind: str, source: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        grammar_source(kind, source)
