from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.tokenizer.replies.grammars.lark import LarkGrammar, regex, search_pattern
from shared.request.grammar import GrammarError, GrammarLibrary
from tests.support.models.tiny_tokenizer import IM_END_ID


@pytest.fixture(scope="module")
def library(model_dir: Path) -> GrammarLibrary:
    """The library with the tiny tokenizer."""
    return GrammarLibrary(model_dir, (IM_END_ID,))


def fits(library: GrammarLibrary, source: str, text: str) -> bool:
    """Whether a grammar allows a text."""
    matcher = library.compile(source)
    token_ids = library.tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^$", [""], ["a"]),
        ("^a|b$", ["a", "ac", "b", "cb"], ["ca", "bc"]),
        ("[a&&[b]]", ["xb]", "&]"], ["b", "a&"]),
        (r"^\s/\d$", ["\u00a0/1"], ["x/1", " /٣"]),
    ],
)
def test_text_until_a_marker_matches_a_schemas_pattern(
    library: GrammarLibrary, pattern: str, good: list[str], bad: list[str]
) -> None:
    grammar = LarkGrammar({})
    source = grammar.source(grammar.text_until("</arg>", regex(search_pattern(pattern))))
    assert [text for text in good if not fits(library, source, f"{text}</arg>")] == []
    assert [text for text in bad if fits(library, source, f"{text}</arg>")] == []


def test_the_arguments_of_a_call_are_read_as_json_schema_says(library: GrammarLibrary) -> None:
    grammar = LarkGrammar({})
    schema = {"type": "string", "format": "color", "pattern": "^.$", "description": "\x00"}
    source = grammar.source(grammar.json(json.loads(json.dumps(schema))))
    assert fits(library, source, '"a"')
    assert not fits(library, source, '"\u2028"')
    with pytest.raises(GrammarError, match='"not" is not supported, at #/items/not'):
        grammar.json({"items": {"not": {}}})
