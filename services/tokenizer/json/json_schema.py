"""Reads JSON schemas for the grammar library: what it would misread is refused, translated or, where it constrains
nothing, left out.

Source: JSON Schema 2020-12, "Core" and "Validation"; llguidance, docs/json_schema.md.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from services.tokenizer.json.ecma_regex import UnsupportedPatternError, full_match_regex
from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.json.schema_places import SchemaPlace, draft_of, pointer_into, referenced, subschemas
from services.tokenizer.json.text_formats import WITH_DATES
from shared.request.grammar import GrammarError

# The library does not accept much more.
MAX_SCHEMA_DEPTH = 100

# For a schema's "x-guidance". \u is not allowed: with it, the library would accept another property's name, escaped, as
# an additional property.
STRICT_JSON: JsonObject = {"json_allowed_escapes": 'nrbtf\\"', "lenient": False, "coerce_one_of": False}

# The formats that the library knows. Any other is an annotation ("Validation", section 7.2.1).
FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])

# Keywords that the library cannot hold, and the first draft that has them; it ignores them in earlier ones.
_UNSUPPORTED = {
    **dict.fromkeys(("not", "uniqueItems", "dependencies"), 4),
    **dict.fromkeys(("contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "maxContains", "minContains"), 2019),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "$recursiveRef", "$recursiveAnchor"), 2019),
    **dict.fromkeys(("$dynamicRef", "$dynamicAnchor"), 2020),
}

# The library computes bounds as doubles, which cannot represent every whole number above this.
_LARGEST_BOUND = 2**53
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Whole numbers that the library does not round.
_EXACT = range(-(2**63), 2**64)

# Characters that JSON writes with \u. Where only such a character may come, the library omits it.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


class SchemaError(GrammarError):
    """A schema cannot be used because of one of its keywords."""

    def __init__(self, problem: str, place: str) -> None:
        """`place` is a JSON pointer as a URI fragment (RFC 6901, section 6)."""
        super().__init__(f"{problem}, at {place}")
        self.problem = problem
        self.place = place


@dataclass(frozen=True, slots=True)
class HeldSchema:
    """A schema that the library reads as JSON Schema does."""

    schema: JsonValue
    not_held: tuple[str, ...]
    """The keywords that were left out although they constrain something, as JSON pointers."""


def held_schema(schema: JsonValue, *, is_strict: bool = True) -> HeldSchema:
    """Read a schema, which stays as it is.

    Args:
        is_strict: Whether to refuse what the library cannot hold; otherwise such keywords are left out.

    Raises:
        GrammarError: the schema has options for the library, or names, values or patterns with control characters or
            with numbers that the library would round. If `is_strict`, also for unsupported keywords, patterns and
            bounds, and for `minProperties` above the number of `required` names plus one: the library allows an
            additional name twice, which counts once.
    """
    reader = _Reader(copy.deepcopy(schema), is_strict=is_strict)
    reader.read()
    return HeldSchema(reader.root, tuple(reader.not_held))


class _Reader:
    """Changes a schema in place."""

    def __init__(self, root: JsonValue, *, is_strict: bool) -> None:
        self.root = root
        self.not_held: list[str] = []
        self._is_strict = is_strict
        self._data: set[int] = set()
        self._seen: set[int] = set()
        self._by_pattern: list[tuple[JsonObject, str]] = []

    def read(self) -> None:
        places = [SchemaPlace(self.root, "#", draft_of(self.root, 2020))]
        references: list[tuple[str, str]] = []
        while places:
            place = places.pop()
            node = place.node
            if not isinstance(node, dict) or id(node) in self._seen:
                continue
            self._seen.add(id(node))
            if isinstance(reference := node.get("$ref"), str):
                references.append((reference, place.pointer))
            self._read_node(node, place)
            places += reversed(list(subschemas(place)))
            if not places:
                # Only now: what they refer to is mostly a place of its own.
                places = [target for reference in references for target in self._targets(*reference)]
                references = []
        # Last, since places are told by the client's own names.
        for by_pattern, pointer in self._by_pattern:
            self._read_pattern_properties(by_pattern, pointer)

    def _targets(self, reference: str, pointer: str) -> list[SchemaPlace]:
        target = referenced(self.root, reference)
        if target is None:
            return []
        # Data stays as it is, and the names of patterns do not.
        if "patternProperties" in target.steps or id(target.node) in self._data:
            raise SchemaError("a reference to what is not a schema is not supported", f"{pointer}/$ref")
        return [target]

    def _read_node(self, node: JsonObject, place: SchemaPlace) -> None:
        if "x-guidance" in node:
            raise SchemaError('"x-guidance" is not allowed', place.pointer)
        for keyword in ("const", "enum"):
            if keyword in node:
                self._check_data(node[keyword], f"{place.pointer}/{keyword}")
        for keyword in ("properties", "required"):
            names = node.get(keyword)
            if isinstance(names, dict | list) and any(isinstance(n, str) and _CONTROL.search(n) for n in names):
                raise SchemaError("control characters are not supported", f"{place.pointer}/{keyword}")
        self._read_keywords(node, place)
        self._read_bounds(node, place.pointer)
        self._read_patterns(node, place.pointer)
        self._read_format(node)

    def _check_data(self, data: JsonValue, pointer: str) -> None:
        for value in _values(data):
            if isinstance(value, dict | list):
                self._data.add(id(value))
            elif isinstance(value, str) and _CONTROL.search(value):
                raise SchemaError("control characters are not supported", pointer)
            elif type(value) is int and _is_rounded(value):
                raise SchemaError(f"{_shortened(value)} is not supported: whole numbers have at most 64 bits", pointer)

    def _read_keywords(self, node: JsonObject, place: SchemaPlace) -> None:
        if isinstance(anchor := node.get("$dynamicAnchor"), str):
            node.setdefault("$anchor", anchor)
        known = [keyword for keyword, draft in _UNSUPPORTED.items() if place.draft >= draft]
        while idle := [keyword for keyword in known if keyword in node and _constrains_nothing(keyword, node, known)]:
            for keyword in idle:
                del node[keyword]
        for keyword in known:
            if keyword in node:
                self._leave_out(node, keyword, place.pointer, f'"{keyword}" is not supported')

    def _read_bounds(self, node: JsonObject, pointer: str) -> None:
        for keyword in _COUNTS:
            if isinstance(count := node.get(keyword), float) and count.is_integer():
                # A whole number in JSON Schema ("Core", section 4.2.3), but not in the library.
                node[keyword] = int(count)
        least, required = node.get("minProperties"), node.get("required")
        num_required = len(required) if isinstance(required, list) else 0
        if isinstance(least, int | float) and least > num_required + 1:
            problem = '"minProperties" is supported only up to one more than the number of "required" properties'
            self._leave_out(node, "minProperties", pointer, problem)
        for keyword in _BOUNDS:
            bound = node.get(keyword)
            if not isinstance(bound, int | float):
                continue
            if abs(bound) > _LARGEST_BOUND and _may_be_whole(node.get("type")):
                problem = f'"{keyword}" {_shortened(bound)} is not supported: at most 2**53 for whole numbers'
                self._leave_out(node, keyword, pointer, problem)
            elif type(bound) is int and _is_rounded(bound):
                problem = f"{_shortened(bound)} is not supported: whole numbers have at most 64 bits"
                self._leave_out(node, keyword, pointer, problem)

    def _read_patterns(self, node: JsonObject, pointer: str) -> None:
        pattern = node.get("pattern")
        if isinstance(pattern, str):
            if (regex := self._regex(pattern, f"{pointer}/pattern")) is None:
                del node["pattern"]
            else:
                node["pattern"] = regex
        by_pattern = node.get("patternProperties")
        if isinstance(by_pattern, dict):
            self._by_pattern.append((by_pattern, f"{pointer}/patternProperties"))

    def _read_format(self, node: JsonObject) -> None:
        name = node.get("format")
        if not isinstance(name, str):
            return
        if name not in FORMATS:
            del node["format"]
        elif name in WITH_DATES:
            # The library has a 29 February in every year.
            day: JsonObject = {"pattern": f"^(?:{WITH_DATES[name]})$"}
            if "pattern" not in node:
                node |= day
            elif isinstance(parts := node.setdefault("allOf", []), list):
                # It is the library's already.
                self._seen.add(id(day))
                parts.append(day)

    def _read_pattern_properties(self, by_pattern: JsonObject, pointer: str) -> None:
        for pattern in list(by_pattern):
            schema = by_pattern.pop(pattern)
            regex = self._regex(pattern, pointer_into(pointer, pattern))
            if regex in by_pattern:
                raise SchemaError("two patterns are the same", pointer)
            if regex is not None:
                by_pattern[regex] = schema

    def _regex(self, pattern: str, pointer: str) -> str | None:
        try:
            return f"^(?:{full_match_regex(pattern)})$"
        except UnsupportedPatternError as error:
            if self._is_strict:
                raise SchemaError(str(error), pointer) from None
            self.not_held.append(pointer)
            return None
        except GrammarError as error:
            raise SchemaError(str(error), pointer) from None

    def _leave_out(self, node: JsonObject, keyword: str, pointer: str, problem: str) -> None:
        if self._is_strict:
            raise SchemaError(problem, f"{pointer}/{keyword}")
        del node[keyword]
        self.not_held.append(f"{pointer}/{keyword}")


def _constrains_nothing(keyword: str, node: JsonObject, known: Collection[str]) -> bool:
    value = node[keyword]
    match keyword:
        case "uniqueItems" | "not":
            return value is False
        case "if":
            return "then" not in node and "else" not in node
        case "then" | "else" if "if" not in node:
            return True
        case "minContains" | "maxContains":
            return "contains" not in node
        case "contains":
            return "minContains" in known and node.get("minContains") == 0 and "maxContains" not in node
    return keyword in ("$recursiveAnchor", "$dynamicAnchor") or value is True or value == {}


def _may_be_whole(kind: JsonValue) -> bool:
    return kind == "integer" or (isinstance(kind, list) and "integer" in kind)


def _is_rounded(number: int) -> bool:
    return number not in _EXACT and int(float(number)) != number


def _shortened(number: float) -> str:
    text = str(number)
    return text if len(text) <= 30 else f"{text[:20]}… ({len(text)} characters)"


def _values(value: JsonValue) -> Iterator[JsonValue]:
    """A value and everything nested in it, names included."""
    values = [value]
    while values:
        value = values.pop()
        yield value
        if isinstance(value, dict):
            values.extend(value)
            values.extend(value.values())
        elif isinstance(value, list):
            values.extend(value)
