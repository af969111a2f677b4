"""Reads a request's JSON into fields: which are refused, and which are ignored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from services.tokenizer.http.fields.counts import check_counts
from services.tokenizer.http.fields.field_rules import DONE_ANYWAY, HARMLESS, REFUSED, WITHOUT_EFFECT
from services.tokenizer.http.refusals import HttpError, invalid_field
from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.request.checks import MAX_STOP_STRINGS

_IGNORED_HEADER_BYTES = 1024
_SEPARATOR = ", "
_MAX_INDEX = 2**32 - 1
_MAX_EXACT = 2**53
"""The largest number up to which a double is the whole number that was written."""
# The length of a name in an error.
_MAX_NAME_LENGTH = 256


class Fields(BaseModel):
    """Fields of the API. Null means absent everywhere; names that neither these nor the table know are refused."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True)


class EchoedFields(Fields):
    """Fields of what clients send back, perhaps from another provider: names that are not known are only named."""


FieldsT = TypeVar("FieldsT", bound=Fields)
ItemT = TypeVar("ItemT")

Several = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: a body has room for a million, and each would be an error object."""


def _whole(value: object) -> object:
    """`5.0` and `2e0` are integers in JSON."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT:
        return int(value)
    return value


Whole = Annotated[int, BeforeValidator(_whole, json_schema_input_type=int)]
# Numbers that fit the messages' fields.
Count = Annotated[Whole, Field(ge=0, le=_MAX_INDEX)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Stops = Annotated[Several[str], Field(max_length=MAX_STOP_STRINGS)]
TextOrTexts = Annotated[Stops, BeforeValidator(_as_list, json_schema_input_type=str | list[str])]


def read_fields(kind: type[FieldsT], value: JsonObject) -> FieldsT:
    """Read fields.

    Raises:
        HttpError: names the first one that is wrong.
    """
    check_counts(kind, value)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _first_problem(error) from None


def read_request(kind: type[FieldsT], value: JsonObject, *, is_lenient: bool) -> tuple[FieldsT, list[str]]:
    """Read a request: its fields, and the names of those that have no effect.

    Args:
        kind: The fields that the route reads.
        value: The request.
        is_lenient: Whether names that nobody knows have no effect, instead of being refused.

    Raises:
        HttpError: names the first field that is wrong, unknown, or cannot be honoured.
    """
    _check_honoured(value, _names_of(kind))
    fields = read_fields(kind, value)
    return fields, _fitting(_ignored(fields, value, _ROOT, is_lenient=is_lenient))


def _check_honoured(value: JsonObject, known: Collection[str]) -> None:
    """Before all else, since what cannot be honoured says more than what is wrong."""
    for name in value:
        if name not in known:
            _check_value(_ROOT.at(name), value[name])


def _check_value(place: _Place, value: JsonValue) -> None:
    if value is not None and place.path in REFUSED and not _is_among(value, REFUSED[place.path]):
        raise invalid_field(place.name, "is not supported")


def _is_among(value: JsonValue, others: Iterable[JsonValue]) -> bool:
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in others)


@cache
def _names_of(kind: type[Fields]) -> dict[str, str]:
    """The names in the JSON, and those of the attributes."""
    return {each.alias or name: name for name, each in kind.model_fields.items()}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value is in a request."""

    name: str
    """The field's name, with the indices of lists."""
    path: str
    """Without them, as the table has it."""

    def at(self, name: str) -> _Place:
        return _Place(f"{self.name}.{name}", f"{self.path}.{name}") if self.name else _Place(name, name)

    def item(self, index: int) -> _Place:
        return _Place(f"{self.name}[{index}]", self.path)


_ROOT = _Place("", "")


def _ignored(fields: Fields, value: JsonObject, place: _Place, *, is_lenient: bool) -> Iterator[str]:
    """The names of values that have no effect, also inside of others.

    Args:
        fields: What was read.
        value: What it was read from.
        place: Where `value` is.
        is_lenient: See `read_request`.

    Raises:
        HttpError: names a field that is unknown or cannot be honoured.
    """
    known, is_echoed = _names_of(type(fields)), isinstance(fields, EchoedFields)
    is_lenient = is_lenient or is_echoed
    for name, given in value.items():
        if given is None or name in DONE_ANYWAY:
            continue
        at = place.at(name)
        if at.path in WITHOUT_EFFECT:
            if not _is_among(given, HARMLESS.get(at.path, ())):
                yield at.name
        elif name in known:
            yield from _ignored_inside(getattr(fields, known[name]), given, at, is_lenient=is_lenient)
        elif at.path in REFUSED and not is_echoed:
            _check_value(at, given)
        elif is_lenient:
            yield at.name
        else:
            raise invalid_field(at.name[:_MAX_NAME_LENGTH], "is not known, and may change the answer")


def _ignored_inside(read: object, given: JsonValue, place: _Place, *, is_lenient: bool) -> Iterator[str]:
    if isinstance(read, Fields) and isinstance(given, dict):
        yield from _ignored(read, given, place, is_lenient=is_lenient)
    elif isinstance(read, list) and isinstance(given, list):
        for index, (item, given_item) in enumerate(zip(read, given, strict=False)):
            if not isinstance(item, Fields):
                return
            yield from _ignored_inside(item, given_item, place.item(index), is_lenient=is_lenient)


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """The header that tells what has no effect, for as many names as fit; without names, none."""
    text = _SEPARATOR.join(_fitting(names))
    return {"x-lockstep-ignored": text} if text else {}


def _fitting(names: Iterable[str]) -> list[str]:
    """Names that the header has room for: a request may have a million, each longer than all of the request's text."""
    kept: list[str] = []
    num_bytes = -len(_SEPARATOR)
    for name in names:
        longer = num_bytes + len(_SEPARATOR) + len(name)
        if name.isascii() and name.isprintable() and longer <= _IGNORED_HEADER_BYTES:
            kept.append(name)
            num_bytes = longer
    return kept


def _first_problem(error: ValidationError) -> HttpError:
    details = error.errors(include_url=False, include_input=False)[0]
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] == "too_long":
        message = f"must have at most {details['ctx']['max_length']} items"
    return invalid_field(_place(details["loc"]) or None, message[:1].lower() + message[1:])


def _place(location: Sequence[Any]) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return "".join(steps).removeprefix(".")
