"""Counts the objects of a body before they are read: a message, a part or a tool that is read takes up to four times
what it takes parsed, and longer than parsing it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.json.json_values import JsonObject

MAX_OBJECTS = 16 * 1024
"""The most objects that a body may have in its fields at all depths. What is passed on unread, such as a schema, has
none."""

_Kinds = frozenset[type[BaseModel]]


def check_counts(kind: type[BaseModel], value: JsonObject) -> None:
    """Refuse a body with too many objects, at a cost that does not depend on how many they are.

    Args:
        kind: What the body is to be read as.
        value: The body.

    Raises:
        HttpError: names the field that has too many.
    """
    num_objects = 0
    for name, kinds in _inner_kinds(frozenset((kind,))).items():
        unread: list[tuple[_Kinds, Any]] = [(kinds, value.get(name))]
        while unread:
            kinds_of_items, found = unread.pop()
            if not isinstance(found, dict | list):
                continue
            items = found if isinstance(found, list) else [found]
            num_objects += len(items)
            if num_objects > MAX_OBJECTS:
                raise invalid_field(name, f"a request must have at most {MAX_OBJECTS} messages, parts, calls and tools")
            inner = _inner_kinds(kinds_of_items)
            for item in items:
                if isinstance(item, dict):
                    unread += ((kinds_inside, item.get(key)) for key, kinds_inside in inner.items())


@functools.cache
def _inner_kinds(kinds: _Kinds) -> Mapping[str, _Kinds]:
    """What the fields of objects of these kinds are read as; fields without objects are left out."""
    inner: dict[str, _Kinds] = {}
    for kind in kinds:
        for name, field in kind.model_fields.items():
            if found := frozenset(_kinds_in(field.annotation)):
                key = field.alias or name
                inner[key] = inner.get(key, frozenset()) | found
    return inner


def _kinds_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _kinds_in(part)
