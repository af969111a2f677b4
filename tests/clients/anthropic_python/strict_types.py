"""Validates JSON strictly against the types of Anthropic's library, which itself takes anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError


def problems_of(kind: Any, value: Any) -> list[str]:
    """What is wrong with a JSON value of this type; empty if nothing is, and no field is unknown."""
    try:
        # Strings of JSON are dates where the type says so.
        instance = TypeAdapter(kind).validate_json(_encoded(value), strict=True)
    except ValidationError as error:
        return [str(error)]
    return [f"{type(model).__name__} has {name}" for model in _models_in(instance) for name in model.model_extra or ()]


def _encoded(value: Any) -> bytes:
    return TypeAdapter(Any).dump_json(value)


def _models_in(value: Any) -> Iterator[BaseModel]:
    if isinstance(value, BaseModel):
        yield value
        for name in type(value).model_fields:
            yield from _models_in(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from _models_in(item)
