"""JSON from clients and models, read strictly: what is wrong with it is told with its place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
JsonObject = dict[str, JsonValue]

MAX_DEPTH = 64

# What a double can hold: the next whole number rounds to infinity.
_LARGEST = 2**1024 - 2**970 - 1
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_SHOWN = 60

_Key = str | int


@dataclass(frozen=True, slots=True)
class _NoValue:
    """What stands where JSON has a value."""

    text: str


def read_json_object(text: str) -> JsonObject:
    """Read a JSON object; see `read_json`.

    Raises:
        ValueError: it is something else, or nested more than 64 deep.
    """
    value = read_json(text, max_depth=MAX_DEPTH)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def read_json(text: str, *, max_depth: int) -> JsonValue:
    """Read JSON whose numbers a double can hold, and whose strings are text that UTF-8 can hold.

    Raises:
        ValueError: it is something else, or nested more than `max_depth` deep. The message says where.
    """
    try:
        value = _parse(text)
    except RecursionError:
        raise ValueError(f"nested too deep: more than {max_depth} levels") from None
    _check(value, max_depth)
    return value


def _parse(text: str) -> JsonValue:
    """The value, in which `_NoValue` stands where there is none.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is nested thousands of levels deep.
    """
    try:
        value: JsonValue = json.loads(text, parse_constant=_NoValue)
    except json.JSONDecodeError:
        raise
    except ValueError:
        # A number of thousands of digits, which Python does not read.
        value = json.loads(text, parse_constant=_NoValue, parse_int=_read_int)
    return value


def _read_int(text: str) -> int | _NoValue:
    return int(text) if len(text) <= _MAX_SHOWN else _NoValue(text)


def _check(root: JsonValue, max_depth: int) -> None:
    """Refuse what is no value, and what is nested too deep."""
    keys: list[_Key] = [""]
    open_items = [_items([root])]
    while open_items:
        for key, value in open_items[-1]:
            # Long lists are of numbers mostly, and this is the event loop's time.
            if type(key) is type(value) is int and -_LARGEST <= value <= _LARGEST:
                continue
            keys[-1] = key
            if isinstance(key, str) and _SURROGATE.search(key):
                raise ValueError(f"half of a surrogate pair is no text, in a name at {_place(keys)}")
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
    """What is wrong with a value that holds no others."""
    if isinstance(value, int | float):
        return None if -_LARGEST <= value <= _LARGEST else "a number is beyond 1.8e308"
    if isinstance(value, str):
        # It can be written in JSON, and nowhere else.
        return "half of a surrogate pair is no text" if _SURROGATE.search(value) else None
    if not isinstance(value, _NoValue):
        return None
    if len(value.text) > _MAX_SHOWN:
        return f"a number of {len(value.text)} characters is beyond 1.8e308"
    return f"{value.text} is no JSON value"


def _place(keys: list[_Key]) -> str:
    """As JSONPath has it; the beginning of a long one."""
    # The first key is that of the whole value.
    steps = (f"[{key}]" if isinstance(key, int) else f".{_SURROGATE.sub('?', key)}" for key in keys[1:])
    place = "$" + "".join(steps)
    return place if len(place) <= _MAX_SHOWN else f"{place[:_MAX_SHOWN]}…"
