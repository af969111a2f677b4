"""Reads a request's JSON into fields: which are refused, and which are ignored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from services.tokenizer.http.refusals import HttpError, invalid_field
from services.tokenizer.http.requests.counts import check_counts
from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.request.checks import MAX_STOP_STRINGS

_IGNORED_HEADER_BYTES = 1024
_MAX_INDEX = 2**32 - 1


class Fields(BaseModel):
    """Fields of the API. Null means absent everywhere; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True)


FieldsT = TypeVar("FieldsT", bound=Fields)
ItemT = TypeVar("ItemT")

Several = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: a body has room for a million, and each would be an error object."""

# Numbers that fit the messages' fields.
Count = Annotated[int, Field(ge=0, le=_MAX_INDEX)]


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


def check_honoured(value: JsonObject, only: Mapping[str, Sequence[object]]) -> None:
    """Refuse fields that would change the answer and cannot be honoured.

    Args:
        value: The request.
        only: The fields' names, with the values that ask for nothing.

    Raises:
        HttpError: names the first one.
    """
    for name, harmless in only.items():
        given = value.get(name)
        if given is not None and given not in harmless:
            raise invalid_field(name, "is not supported")


def ignored_names(fields: Fields, value: JsonObject, others: Collection[str] = (), *, place: str = "") -> Iterator[str]:
    """The names of values that have no effect, also inside others: those that `fields` does not know.

    Args:
        fields: What was read.
        value: What it was read from.
        others: Further names that are known.
        place: Where `value` is in the request, as the beginning of a name; empty for the request itself.
    """
    kinds = type(fields).model_fields
    known = {kind.alias or name: name for name, kind in kinds.items()}
    for name, given in value.items():
        if given is None or name in others:
            continue
        if name not in known:
            yield f"{place}{name}"
            continue
        read = getattr(fields, known[name])
        yield from _ignored_inside(read, given, f"{place}{name}")


def _ignored_inside(read: object, given: JsonValue, place: str) -> Iterator[str]:
    if isinstance(read, Fields) and isinstance(given, dict):
        yield from ignored_names(read, given, place=f"{place}.")
    elif isinstance(read, list) and isinstance(given, list):
        for index, (item, given_item) in enumerate(zip(read, given, strict=False)):
            if not isinstance(item, Fields):
                return
            yield from _ignored_inside(item, given_item, f"{place}[{index}]")


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """The header that tells what has no effect, for as many names as fit; without names, none."""
    text = ""
    for name in names:
        longer = f"{text}, {name}" if text else name
        if name.isascii() and name.isprintable() and len(longer) <= _IGNORED_HEADER_BYTES:
            text = longer
    return {"x-lockstep-ignored": text} if text else {}


def _first_problem(error: ValidationError) -> HttpError:
    details = error.errors(include_url=False, include_input=False)[0]
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] == "too_long":
        message = f"must have at most {details['ctx']['max_length']} items"
    return invalid_field(_place(details["loc"]) or None, message[:1].lower() + message[1:])


def _place(location: Sequence[Any]) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return "".join(steps).removeprefix(".")
