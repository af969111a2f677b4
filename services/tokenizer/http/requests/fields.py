"""Reads a request's JSON into fields: which are refused, and which are ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from services.tokenizer.http.errors import HttpError, invalid_field
from services.tokenizer.json.json_values import JsonObject

_IGNORED_HEADER_BYTES = 1024
_MAX_INDEX = 2**32 - 1


class Fields(BaseModel):
    """Fields of the API. Null means absent everywhere; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True)


FieldsT = TypeVar("FieldsT", bound=Fields)

# Numbers that fit the messages' fields.
Count = Annotated[int, Field(ge=0, le=_MAX_INDEX)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


TextOrTexts = Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])]


def read_fields(kind: type[FieldsT], value: JsonObject) -> FieldsT:
    """Read fields.

    Raises:
        HttpError: names the first one that is wrong.
    """
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


def ignored_names(kind: type[Fields], value: JsonObject, others: Sequence[str]) -> list[str]:
    """The names of the request's fields that have no effect: neither fields of `kind` nor among `others`."""
    return [
        name
        for name, given in value.items()
        if given is not None and name not in kind.model_fields and name not in others
    ]


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that tells what has no effect, for as many names as fit; without names, none."""
    text = ""
    for name in names:
        longer = f"{text}, {name}" if text else name
        if name.isascii() and name.isprintable() and len(longer) <= _IGNORED_HEADER_BYTES:
            text = longer
    return {"x-lockstep-ignored": text} if text else {}


def _first_problem(error: ValidationError) -> HttpError:
    details = error.errors(include_url=False, include_context=False, include_input=False)[0]
    message = details["msg"].removeprefix("Value error, ")
    return invalid_field(_place(details["loc"]) or None, message[:1].lower() + message[1:])


def _place(location: Sequence[Any]) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return "".join(steps).removeprefix(".")
