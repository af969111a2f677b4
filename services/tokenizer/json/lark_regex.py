r"""Writes a Lark grammar without recursion as a regular expression, for texts that are inside JSON strings.

No grammar library can quote what a context-free grammar describes; a regular expression it can.

Source: Lark's grammar reference, https://lark-parser.readthedocs.io/en/stable/grammar.html. What is imported is that of
its `common` grammar. Not read: `%ignore` and other directives, templates, and flags of expressions but `i` and `s`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from shared.request.grammar import GrammarError

_MAX_LENGTH = 8_000
_MAX_DIGITS = 9
# The depth of brackets and rules inside each other.
_MAX_DEPTH = 64
_COMMON = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
}
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f]+|//[^\n]*|\#[^\n]*|\n\s*(?=\|)|\n[ \t\r]*(?=\n))
    |(?P<end>\n)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<name>%?[?!]*[A-Za-z_]\w*)
    |(?P<number>\d+)
    |(?P<sign>\.\.|->|[:|()\[\]?*+~.,])""",
    re.VERBOSE,
)
_SYNTAX = re.compile(r"[\\^$.*+?()\[\]{}|/]")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str


def lark_regex(grammar: str) -> str:
    """The regular expression, in ECMA-262's syntax, that matches whole what the grammar's `start` describes.

    Raises:
        GrammarError: the grammar is recursive, malformed or too long, or has what is not read here.
    """
    if len(grammar) > _MAX_LENGTH:
        raise GrammarError("it is too long")
    rules, imported = _read_statements(_tokens(grammar))
    return _Writer(rules, imported).written("start", 0)


def _tokens(grammar: str) -> Iterator[_Token]:
    position = 0
    while position < len(grammar):
        match = _TOKEN.match(grammar, position)
        if match is None:
            raise GrammarError(f"line {grammar.count(chr(10), 0, position) + 1} cannot be read")
        position = match.end()
        assert match.lastgroup is not None
        if match.lastgroup != "space":
            yield _Token(match.lastgroup, match[0])
    yield _Token("end", "")


def _read_statements(tokens: Iterator[_Token]) -> tuple[Mapping[str, list[_Token]], Mapping[str, str]]:
    """The tokens of each rule, and the expressions of what is imported."""
    rules: dict[str, list[_Token]] = {}
    imported: dict[str, str] = {}
    statement: list[_Token] = []
    for token in tokens:
        if token.kind != "end":
            statement.append(token)
            continue
        texts = [token.text for token in statement]
        if texts[:1] == ["%import"]:
            imported |= _read_import(texts[1:])
        elif texts:
            colon = texts.index(":") if ":" in texts else 0
            # A number is a priority.
            if colon not in (1, 3) or statement[0].kind != "name" or texts[0].startswith("%"):
                raise GrammarError("a statement cannot be read")
            rules[texts[0].lstrip("?!")] = statement[colon + 1 :]
        statement = []
    return rules, imported


def _read_import(texts: list[str]) -> dict[str, str]:
    if texts[:2] != ["common", "."] and texts[:1] != ["common"]:
        raise GrammarError("only `common` can be imported")
    names = texts[2:] if texts[1:2] == ["."] else [text for text in texts[1:] if text not in "(),"]
    alias = names[0]
    if len(names) == 3 and names[1] == "->":
        alias, names = names[2], names[:1]
    if unknown := set(names) - _COMMON.keys():
        raise GrammarError(f"common.{min(unknown)} cannot be imported")
    return {alias: _COMMON[names[0]]} if len(names) == 1 else {name: _COMMON[name] for name in names}


class _Writer:
    """Writes rules by putting each in the place of its name."""

    def __init__(self, rules: Mapping[str, list[_Token]], imported: Mapping[str, str]) -> None:
        self._rules = rules
        self._written = dict(imported)
        self._inside: set[str] = set()

    def written(self, name: str, depth: int) -> str:
        """A rule's expression; `depth` is that of its name."""
        if name not in self._written:
            if name in self._inside:
                raise GrammarError("it is recursive")
            if name not in self._rules:
                raise GrammarError("a rule is missing")
            self._inside.add(name)
            self._written[name] = _Reader(self._rules[name], self.written, depth).read()
            self._inside.remove(name)
        return self._written[name]


class _Reader:
    """Reads the right side of a rule."""

    def __init__(self, tokens: list[_Token], written: Callable[[str, int], str], depth: int) -> None:
        self._tokens = [*tokens, _Token("end", "")]
        self._position = 0
        self._written = written
        self._depth = depth

    def read(self) -> str:
        text = self._nested()
        if self._next.kind != "end":
            raise GrammarError("a rule cannot be read")
        return text

    @property
    def _next(self) -> _Token:
        return self._tokens[self._position]

    def _take(self, *texts: str) -> bool:
        if self._next.kind in ("sign", "name") and self._next.text in texts:
            self._position += 1
            return True
        return False

    def _nested(self) -> str:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise GrammarError("it is too deep")
        text = self._alternatives()
        self._depth -= 1
        return text

    def _alternatives(self) -> str:
        text = self._sequence()
        if self._next.text != "|":
            return text
        while self._take("|"):
            text = _checked(f"{text}|{self._sequence()}")
        return f"(?:{text})"

    def _sequence(self) -> str:
        text = ""
        while self._next.kind != "end" and self._next.text not in ("|", ")", "]"):
            if self._take("->"):
                self._read_alias()
                break
            text = _checked(text + self._repeated(self._atom()))
        return text

    def _read_alias(self) -> None:
        if self._next.kind != "name":
            raise GrammarError("an alias is missing")
        self._position += 1

    def _repeated(self, atom: str) -> str:
        sign = self._next.text
        if self._take("?", "*", "+"):
            return f"(?:{atom}){sign}"
        if not self._take("~"):
            return atom
        least = most = self._number()
        if self._take(".."):
            most = self._number()
        return f"(?:{atom}){{{least},{most}}}"

    def _number(self) -> int:
        token = self._tokens[self._position]
        self._position += 1
        if token.kind != "number" or len(token.text) > _MAX_DIGITS:
            raise GrammarError("a number is missing")
        return int(token.text)

    def _atom(self) -> str:
        token = self._next
        self._position += 1
        match token.kind, token.text:
            case "string", text:
                return self._range_or_text(text)
            case "regex", text:
                return _expression(text)
            case "name", text:
                return self._written(text, self._depth)
            case "sign", "(":
                return self._enclosed(")")
            case "sign", "[":
                return f"(?:{self._enclosed(']')})?"
        raise GrammarError("a rule cannot be read")

    def _enclosed(self, end: str) -> str:
        text = self._nested()
        if not self._take(end):
            raise GrammarError("a bracket is not closed")
        return text

    def _range_or_text(self, text: str) -> str:
        if not self._take(".."):
            return _literal(text)
        first, last = (_literal(each) for each in (text, self._tokens[self._position].text))
        self._position += 1
        return f"[{first}-{last}]"


def _checked(text: str) -> str:
    if len(text) > _MAX_LENGTH:
        raise GrammarError("it is too long")
    return text


def _literal(token: str) -> str:
    """A text, escaped."""
    ignores_case = token.endswith("i")
    try:
        text = ast.literal_eval(token.removesuffix("i"))
    except (SyntaxError, ValueError):
        raise GrammarError("a text is malformed") from None
    escaped = _SYNTAX.sub(r"\\\g<0>", text)
    return f"(?i:{escaped})" if ignores_case else escaped


def _expression(token: str) -> str:
    body, _, flags = token[1:].rpartition("/")
    if not set(flags) <= {"i", "s"}:
        raise GrammarError("an expression has flags that are not read")
    return f"(?{flags}:{body})" if flags else f"(?:{body})"
