"""Translates the regular expressions of JSON schemas into the library's.

Source: ECMA-262, section 22.2 with the flag u, and annex B.1.2 for what that flag forbids without need: lone braces and
escaped punctuation. The library's syntax: https://docs.rs/regex/latest/regex/#syntax.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from shared.request.grammar import GrammarError

_ANY_TEXT = "(?s:.*)"
_ANY_CHARACTER = "(?s:.)"
# The library's own limit is 250 groups, and a group may become two.
_MAX_DEPTH = 100
_MAX_COUNT = 2**31
# Alternatives with and without anchors are spelled out, which could grow without bound.
_MAX_ANCHORED_LENGTH = 20_000

_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d+)(?:(,)(\d*))?\})\??")
_GROUP = re.compile(r"\((?:\?(?:P?<([A-Za-z_$][\w$]*)>|([a-z]*(?:-[a-z]*)?):))?")
_GLOBAL_FLAGS = re.compile(r"\(\?([a-z]+)\)")
_PROPERTY = re.compile(r"[pP]\{\w+(?:=\w+)?\}", re.ASCII)
_LOOK_AROUND = {"(?=": "look-ahead", "(?!": "look-ahead", "(?<=": "look-behind", "(?<!": "look-behind"}

_DIGITS = "0-9"
_WORD = "0-9A-Za-z_"
# WhiteSpace and LineTerminator, sections 12.2 and 12.3.
_SPACE = r"\x{9}-\x{d}\x{20}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
_LINE_ENDS = r"\n\r\x{2028}\x{2029}"
_SETS = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROL_ESCAPES = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_ASSERTIONS = {**dict.fromkeys("bB", "a word boundary"), **dict.fromkeys("123456789k", "a back reference")}
# What JSON writes with \u, which the library does not.
_CONTROL = frozenset((*range(0x08), 0x0B, *range(0x0E, 0x20), 0x7F))

_Anchors = tuple[bool, bool]
# The ways to match: whether the match must begin at the text's start, and whether it must end at its end; the regular
# expression, without anchors; and whether that matches the empty text.
_Ways = dict[_Anchors, tuple[str, bool]]

_NONE: _Anchors = (False, False)
_EMPTY: _Ways = {_NONE: ("", True)}


class UnsupportedPatternError(GrammarError):
    """A pattern asks for what no grammar can guarantee."""


def full_match_regex(pattern: str) -> str:
    """The library's regular expression, without anchors, for whole texts in which `pattern` is found.

    Raises:
        UnsupportedPatternError: the pattern has look-around, back references, word boundaries, anchors in a repetition,
            or needs a control character.
        GrammarError: it is malformed, or matches no text.
    """
    ways = _Parser(pattern).parse()
    if not ways:
        raise GrammarError("no text matches")
    texts = [
        f"{'' if at_start else _ANY_TEXT}{regex}{'' if at_end else _ANY_TEXT}"
        for (at_start, at_end), (regex, _) in ways.items()
    ]
    return _either(texts)


class _Parser:
    """Reads a pattern once, from its start to its end."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._place = 0
        self._depth = 0
        self._dot_matches_all = False

    def parse(self) -> _Ways:
        # Not ECMA-262, but what people write who test with Python.
        flags = _GLOBAL_FLAGS.match(self._pattern)
        if flags:
            self._place = flags.end()
            ways = self._with_flags(flags[1])
        else:
            ways = self._alternatives()
        if self._place < len(self._pattern):
            raise self._error("a parenthesis is not open")
        return ways

    def _alternatives(self) -> _Ways:
        ways = [self._sequence()]
        while self._take("|"):
            ways.append(self._sequence())
        return ways[0] if len(ways) == 1 else _any_of(ways)

    def _sequence(self) -> _Ways:
        ways, plain = _EMPTY, _Plain()
        while self._place < len(self._pattern) and self._pattern[self._place] not in "|)":
            term = self._term()
            if term.keys() != {_NONE}:
                ways = _one_after_other(_one_after_other(ways, plain.ways()), term)
                plain = _Plain()
                self._check_size(ways)
            else:
                plain.add(*term[_NONE])
        return _one_after_other(ways, plain.ways())

    def _term(self) -> _Ways:
        if self._take("^"):
            return {(True, False): ("", True)}
        if self._take("$"):
            return {(False, True): ("", True)}
        ways = self._atom()
        quantifier = _QUANTIFIER.match(self._pattern, self._place)
        if quantifier is None:
            return ways
        least, most = self._counts(quantifier)
        self._place = quantifier.end()
        if (second := _QUANTIFIER.match(self._pattern, self._place)) is not None:
            raise self._error(f'nothing to repeat before "{second[0][:8]}"')
        return self._repeated(ways, least, most)

    def _counts(self, quantifier: re.Match[str]) -> tuple[int, int | None]:
        if quantifier[1]:
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[quantifier[1]]
        least, most = self._count(quantifier[2]), self._count(quantifier[4] or quantifier[2])
        if most < least:
            raise self._error("the numbers of a quantifier are out of order")
        return least, None if quantifier[3] and not quantifier[4] else most

    def _count(self, digits: str) -> int:
        digits = digits.lstrip("0") or "0"
        if len(digits) > len(str(_MAX_COUNT)) or int(digits) > _MAX_COUNT:
            raise self._error("a quantifier is too large")
        return int(digits)

    def _repeated(self, ways: _Ways, least: int, most: int | None) -> _Ways:
        if most == 0:
            return _EMPTY
        if (least, most) == (1, 1):
            return ways
        if not ways:
            return {} if least else _EMPTY
        if (least, most) == (0, 1):
            return _any_of([ways, _EMPTY]) if ways.keys() != {_NONE} else {_NONE: (f"(?:{ways[_NONE][0]})?", True)}
        if ways.keys() != {_NONE}:
            raise self._unsupported("an anchor in a repetition")
        regex, is_nullable = ways[_NONE]
        return {_NONE: (f"(?:{regex}){{{least},{'' if most is None else most}}}", is_nullable or least == 0)}

    def _atom(self) -> _Ways:
        character = self._pattern[self._place]
        if character == "(":
            return self._group()
        if character == "[":
            return self._class()
        if character == ".":
            self._place += 1
            return _one(_ANY_CHARACTER if self._dot_matches_all else f"[^{_LINE_ENDS}]")
        if character in "*+?" or (character == "{" and _QUANTIFIER.match(self._pattern, self._place)):
            raise self._error("nothing to repeat")
        if character == "\\":
            escaped = self._escape()
            return _one(f"[{escaped}]") if isinstance(escaped, str) else self._characters([(escaped, escaped)], [])
        self._place += 1
        return self._characters([(ord(character), ord(character))], [])

    def _group(self) -> _Ways:
        group = _GROUP.match(self._pattern, self._place)
        assert group is not None, "the pattern matches a parenthesis alone"
        for start, name in _LOOK_AROUND.items():
            if self._pattern.startswith(start, self._place):
                raise self._unsupported(name)
        if self._pattern.startswith("?", group.end()) and group.end() == self._place + 1:
            raise self._error("a group is malformed")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"nested too deep: more than {_MAX_DEPTH} groups")
        self._place = group.end()
        ways = self._with_flags(group[2]) if group[2] else self._alternatives()
        if not self._take(")"):
            raise self._error("a parenthesis is not closed")
        self._depth -= 1
        return ways

    def _with_flags(self, flags: str) -> _Ways:
        """The alternatives that follow, under the flags i and s, which are on or, after a minus sign, off."""
        on, _, off = flags.partition("-")
        if "m" in on or set(on + off) - set("ims"):
            raise self._unsupported("a flag other than i and s")
        outer = self._dot_matches_all
        self._dot_matches_all = "s" in on or (outer and "s" not in off)
        ways = self._alternatives()
        self._dot_matches_all = outer
        if "i" in on + off:
            start = "(?i:" if "i" in on else "(?-i:"
            ways = {anchors: (f"{start}{regex})", is_nullable) for anchors, (regex, is_nullable) in ways.items()}
        return ways

    def _class(self) -> _Ways:
        self._place += 1
        is_negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        sets: list[str] = []
        while not self._take("]"):
            first = self._class_atom()
            last = first
            if self._pattern[self._place : self._place + 1] == "-" and self._pattern[self._place + 1 :][:1] != "]":
                self._place += 1
                last = self._class_atom()
                if isinstance(first, str) or isinstance(last, str):
                    ranges.append((ord("-"), ord("-")))
            if isinstance(first, int) and isinstance(last, int):
                if last < first:
                    raise self._error("a range is out of order")
                ranges.append((first, last))
            else:
                ends = (first, last)
                ranges += [(end, end) for end in ends if isinstance(end, int)]
                sets += dict.fromkeys(end for end in ends if isinstance(end, str))
        return self._characters(ranges, sets, is_negated=is_negated)

    def _class_atom(self) -> int | str:
        if self._place >= len(self._pattern):
            raise self._error("a class is not closed")
        if self._pattern[self._place] == "\\":
            return self._escape(in_class=True)
        self._place += 1
        return ord(self._pattern[self._place - 1])

    def _characters(self, ranges: list[tuple[int, int]], sets: list[str], *, is_negated: bool = False) -> _Ways:
        # Half of a surrogate pair is in no text.
        halves = [(low, min(high, 0xD7FF)) for low, high in ranges] + [(max(low, 0xE000), high) for low, high in ranges]
        ranges = sorted({(low, high) for low, high in halves if low <= high})
        if not ranges and not sets:
            return _one(_ANY_CHARACTER) if is_negated else {}
        if not is_negated and not sets and all(_CONTROL.issuperset(range(*_few(low, high))) for low, high in ranges):
            raise self._unsupported("a control character")
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1] and not is_negated and not sets:
            return _one(_literal(ranges[0][0]))
        texts = [_literal(low) if low == high else f"{_literal(low)}-{_literal(high)}" for low, high in ranges]
        return _one(f"[{'^' if is_negated else ''}{''.join(texts)}{''.join(sets)}]")

    def _escape(self, *, in_class: bool = False) -> int | str:
        """The code point, or how a class writes the set."""
        self._place += 1
        letter = self._pattern[self._place : self._place + 1]
        name = _PROPERTY.match(self._pattern, self._place)
        self._place = name.end() if name else self._place + 1
        if name:
            return f"\\{name[0]}"
        if letter.lower() in _SETS:
            return _SETS[letter] if letter in _SETS else f"[^{_SETS[letter.lower()]}]"
        if letter in ("x", "u"):
            return self._code(letter)
        return self._simple_escape(letter, in_class=in_class)

    def _simple_escape(self, letter: str, *, in_class: bool) -> int:
        after = self._pattern[self._place : self._place + 1]
        if letter == "c" and after.isascii() and after.isalpha():
            self._place += 1
            return ord(after) % 32
        if letter == "0" and not after.isdigit():
            return 0
        if letter == "b" and in_class:
            return 0x08
        if letter in _CONTROL_ESCAPES:
            return _CONTROL_ESCAPES[letter]
        if letter in _ASSERTIONS and not in_class:
            raise self._unsupported(_ASSERTIONS[letter])
        if not letter or (letter.isascii() and letter.isalnum()):
            raise self._error(f'"\\{letter}" is not an escape of ECMA-262')
        return ord(letter)

    def _code(self, letter: str) -> int:
        match = re.compile(
            r"[0-9a-fA-F]{2}"
            if letter == "x"
            else r"\{0*([0-9a-fA-F]{1,6})\}"
            r"|([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
            r"|[0-9a-fA-F]{4}"
        ).match(self._pattern, self._place)
        if match is None:
            raise self._error(f'an escape with "\\{letter}" is malformed')
        self._place = match.end()
        groups = match.groups()
        if any(groups[1:]):
            return 0x10000 + ((int(groups[1], 16) & 0x3FF) << 10) + (int(groups[2], 16) & 0x3FF)
        code = int(groups[0] if any(groups) else match[0], 16)
        if code > 0x10FFFF:
            raise self._error("an escape is beyond Unicode")
        return code

    def _take(self, character: str) -> bool:
        is_next = self._pattern.startswith(character, self._place)
        self._place += is_next
        return is_next

    def _check_size(self, ways: _Ways) -> None:
        if sum(len(regex) for regex, _ in ways.values()) > _MAX_ANCHORED_LENGTH and len(ways) > 1:
            raise self._unsupported("so much beside optional anchors")

    def _error(self, problem: str) -> GrammarError:
        return GrammarError(f"{problem}, at character {min(self._place, len(self._pattern)) + 1}")

    def _unsupported(self, what: str) -> UnsupportedPatternError:
        return UnsupportedPatternError(f"{what} is not supported, at character {self._place + 1}")


class _Plain:
    """Terms without anchors, one after the other."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._is_nullable = True

    def add(self, regex: str, is_nullable: bool) -> None:
        self._texts.append(regex)
        self._is_nullable &= is_nullable

    def ways(self) -> _Ways:
        return {_NONE: ("".join(self._texts), self._is_nullable)}


def _one(regex: str) -> _Ways:
    return {_NONE: (regex, False)}


def _any_of(alternatives: Iterable[_Ways]) -> _Ways:
    anchors_to_texts: dict[_Anchors, tuple[list[str], list[bool]]] = {}
    for ways in alternatives:
        for anchors, (regex, is_nullable) in ways.items():
            texts, nullable = anchors_to_texts.setdefault(anchors, ([], []))
            texts.append(regex)
            nullable.append(is_nullable)
    return {anchors: (_either(texts), any(nullable)) for anchors, (texts, nullable) in anchors_to_texts.items()}


def _one_after_other(first: _Ways, second: _Ways) -> _Ways:
    """Before what must be at the start, and after what must be at the end, there is only the empty text."""
    if first is _EMPTY:
        return second
    pairs: list[_Ways] = []
    for (at_start, ends), (before, before_is_nullable) in first.items():
        for (starts, at_end), (after, after_is_nullable) in second.items():
            if (starts and not before_is_nullable) or (ends and not after_is_nullable):
                continue
            regex = f"{'' if starts else before}{'' if ends else after}"
            is_nullable = (starts or before_is_nullable) and (ends or after_is_nullable)
            pairs.append({(at_start or starts, at_end or ends): (regex, is_nullable)})
    return _any_of(pairs)


def _either(texts: list[str]) -> str:
    texts = list(dict.fromkeys(texts))
    return texts[0] if len(texts) == 1 else f"(?:{'|'.join(texts)})"


def _literal(code: int) -> str:
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{code:02x}" if code < 0x100 else f"\\x{{{code:x}}}"


def _few(low: int, high: int) -> tuple[int, int]:
    """The bounds of a range, which may be too long to look at as a whole."""
    return low, min(high, low + len(_CONTROL)) + 1
