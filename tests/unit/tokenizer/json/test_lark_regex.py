"""Lark grammars as regular expressions: they match what the grammar library accepts of the grammars themselves."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.grammar.grammar_source import grammar_source
from services.tokenizer.json.ecma_regex import full_match_regex
from services.tokenizer.json.lark_regex import lark_regex
from shared.request.grammar import GrammarError
from tests.support.models.tiny_tokenizer import VOCABULARY_SIZE
from tests.support.tokenizer.grammar_texts import TextWriter

# Codex's own.
PATCH = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
EXEC = r"""
start: pragma_source | plain_source
pragma_source: PRAGMA_LINE NEWLINE SOURCE
plain_source: SOURCE

PRAGMA_LINE: /[ \t]*\/\/ @exec:[^\r\n]*/
NEWLINE: /\r?\n/
SOURCE: /[\s\S]+/
"""
OTHER = r"""// A comment.
start: [greeting] DIGITS~2..3 ("x" | /[yz]/i)*
    | "q"i "0".."3"  # another
?greeting.2: "hello" WS_INLINE -> called
DIGITS: DIGIT+
%import common (DIGIT, WS_INLINE)
"""


@pytest.fixture(scope="module")
def writer(model_dir: Path) -> TextWriter:
    return TextWriter(model_dir, VOCABULARY_SIZE)


@pytest.mark.parametrize(
    ("grammar", "text", "is_matched"),
    [
        (PATCH, "*** Begin Patch\n*** Update File: a b\n@@\n-hello\n+good (bye)\n*** End Patch\n", True),
        (PATCH, "*** Begin Patch\n*** Add File: a\n+x\n*** Delete File: b\n*** End Patch", True),
        (PATCH, "*** Begin Patch\n*** End Patch", False),
        (PATCH, "*** Begin Patch\n*** Add File: a\nx\n*** End Patch", False),
        (EXEC, "// @exec: {}\nawait x()", True),
        (EXEC, "x\n/y", True),
        (EXEC, "", False),
        (OTHER, "hello  12", True),
        (OTHER, "1234xYz", True),
        (OTHER, "hello 1", False),
        (OTHER, "Q3", True),
        (OTHER, "q4", False),
    ],
)
def test_the_expression_matches_what_the_grammar_describes(
    writer: TextWriter, grammar: str, text: str, *, is_matched: bool
) -> None:
    expression = lark_regex(grammar)
    assert (re.fullmatch(expression, text) is not None) == is_matched
    # The library reads less of Lark.
    assert grammar is OTHER or writer.fits(grammar_source("grammar", grammar).text, text) == is_matched
    # As a schema's pattern it holds a string's text.
    schema = json.dumps({"type": "string", "pattern": f"^(?:{expression})$"})
    assert writer.fits(grammar_source("json_schema", schema).text, json.dumps(text)) == is_matched


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" start?',
        "start: other",
        'begin: "a"',
        'start: "a"\n%ignore " "',
        "start: /a/x",
        "%import python.NAME\nstart: NAME",
        'start: ("a"',
        'start: "a" ~ x',
        "start: %json {}",
        'start: "a\n',
        "\0",
        f"start: {'(' * 3000}'a'{')' * 3000}".replace("'", '"'),
        f"start: {'a ' * 3000}\na: /{'x' * 3000}/",
        "start: r0\n" + "".join(f"r{index}: r{index + 1}\n" for index in range(500)) + 'r500: "x"',
        "start: a a\n"
        + "".join(f"{chr(97 + index)}: {chr(98 + index)} {chr(98 + index)}\n" for index in range(24))
        + 'y: "x"',
    ],
)
def test_what_is_no_regular_expression_is_refused(grammar: str) -> None:
    with pytest.raises(GrammarError):
        lark_regex(grammar)


@given(st.lists(st.sampled_from([*PATCH.split(), *OTHER.split(), *'()[]|?*+~"/:\n', "->", "..", "9" * 5000, "\n"])))
def test_any_text_is_an_expression_or_refused(words: list[str]) -> None:
    with suppress(GrammarError):
        full_match_regex(lark_regex(" ".join(["start:", *words])))
