"""Strict parsing of JSON from clients and models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
JsonObject = dict[str, JsonValue]

MAX_DEPTH = 64

# The largest whole number that a double can represent; the next one rounds to infinity.
_LARGEST = 2**1024 - 2**970 - 1
# A number in JSON's notation (RFC 8259, section 6).
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_SHOWN = 60
# A string, or what looks like the beginning of one; it never goes back.
_STRING = re.compile(r'"(?:[^"\\]+|\\.?)*+(?:"|\Z)', re.DOTALL)

_Key = str | int


@dataclass(frozen=True, slots=True)
class _NoValue:
    """Something that is not a JSON value, such as NaN."""

    text: str


def read_json_object(text: str) -> JsonObject:
    """Read a JSON object with `read_json`.

    Raises:
        ValueError: the text is not one, or nested more than 64 levels deep.
    """
    value = read_json(text, max_depth=MAX_DEPTH)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def most_values(text: str, enough: int) -> int:
    """A number of values that JSON does not exceed, found without parsing it; what is above `enough` may be far off."""
    if (num_values := _count_signs(text)) > enough:
        num_values = _count_signs(_STRING.sub("", text))
    return num_values


def _count_signs(text: str) -> int:
    """Each value is the first one of the text, a list or an object, or comes after a comma."""
    return 1 + sum(map(text.count, ",[{"))


def read_json(text: str, *, max_depth: int, has_unique_names: bool = False) -> JsonValue:
    """Read JSON whose numbers fit a double and whose strings can be UTF-8.

    Args:
        text: The JSON.
        max_depth: How deep it may be nested.
        has_unique_names: Whether no object may have two values of one name; otherwise the last one counts.

    Raises:
        ValueError: the text is not such JSON, or nested deeper than `max_depth`. The message says where.
    """
    try:
        value = _parse(text, _unique if has_unique_names else None)
    except RecursionError:
        raise ValueError(f"nested too deep: more than {max_depth} levels") from None
    _check(value, max_depth)
    return value


def is_beyond_double(number: str) -> bool:
    """Whether `read_json` refuses a number, which `NUMBER` matches, for its size."""
    # The digits of a whole number may be more than `int` takes, and a double may round up to infinity.
    return abs(float(number)) > _LARGEST


def _parse(text: str, make_object: Callable[[list[tuple[str, JsonValue]]], JsonObject] | None) -> JsonValue:
    """`_NoValue` replaces what Python accepts although it is not JSON."""
    try:
        value: JsonValue = json.loads(text, parse_constant=_NoValue, object_pairs_hook=make_object)
    except json.JSONDecodeError:
        raise
    except ValueError:
        # A number with thousands of digits, which `int` refuses.
        value = json.loads(text, parse_constant=_NoValue, parse_int=_read_int, object_pairs_hook=make_object)
    return value


def _unique(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("two values of one name in an object")
    return value


def _read_int(text: str) -> int | _NoValue:
    return int(text) if len(text) <= _MAX_SHOWN else _NoValue(text)


def _check(root: JsonValue, max_depth: int) -> None:
    keys: list[_Key] = [""]
    open_items = [_items([root])]
    while open_items:
        for key, value in open_items[-1]:
            # A fast path: long lists mostly hold numbers, and this runs on the event loop.
            if type(key) is type(value) is int and -_LARGEST <= value <= _LARGEST:
                continue
            keys[-1] = key
            if isinstance(key, str) and _SURROGATE.search(key):
                raise ValueError(f"a lone surrogate is not valid text, in a name at {_place(keys)}")
            if isinstance(value, dict | list):
                if len(open_items) > max_depth:
                    raise ValueError(f"nested too deep: more than {max_depth} levels, at {_place(keys)}")
                open_items.append(_items(value))
                keys.append("")
                break
            if (problem := _find_problem(value)) is not None:
                raise ValueError(f"{problem}, at {_place(keys)}")
        else:
            open_items.pop()
            keys.pop()


def _items(value: JsonObject | list[JsonValue]) -> Iterator[tuple[_Key, JsonValue]]:
    items: Iterable[tuple[_Key, JsonValue]] = value.items() if isinstance(value, dict) else enumerate(value)
    return iter(items)


def _find_problem(value: object) -> str | None:
    if isinstance(value, int | float):
        return None if -_LARGEST <= value <= _LARGEST else "a number is beyond 1.8e308"
    if isinstance(value, str):
        # JSON's escapes can write one, but UTF-8 cannot encode it.
        return "a lone surrogate is not valid text" if _SURROGATE.search(value) else None
    if not isinstance(value, _NoValue):
        return None
    if len(value.text) > _MAX_SHOWN:
        return f"a number of {len(value.text)} characters is beyond 1.8e308"
    return f"{value.text} is not a JSON value"


def _place(keys: list[_Key]) -> str:
    # The first key belongs to the list that wraps the whole value.
    steps = (f"[{key}]" if isinstance(key, int) else f".{_SURROGATE.sub('?', key)}" for key in keys[1:])
    place = "$" + "".join(steps)
    return place if len(place) <= _MAX_SHOWN else f"{place[:_MAX_SHOWN]}…"
