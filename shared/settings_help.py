"""Formats settings in `--help` as a user types them, not as Python types."""

from __future__ import annotations

import argparse
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

_TYPE_TO_VALUE = {int: "N", float: "X", Path: "PATH", str: "TEXT", SecretStr: "KEY", bool: "true,false"}


def name_values(parser: argparse.ArgumentParser, settings_type: type[BaseSettings]) -> None:
    """Set the help texts and value names of a parser made from `settings_type`."""
    for action in parser._actions:
        field = settings_type.model_fields.get(action.dest)
        if field is None or is_hidden(field):
            continue
        action.help = f"{field.description}{_default(field)}".replace("%", "%%")
        if not action.option_strings:
            action.metavar = action.dest.upper()
        elif action.nargs != 0:
            action.metavar = _value_name(action.dest, field.annotation)


def is_positional(field: FieldInfo) -> bool:
    """Whether it is a positional argument, not a flag."""
    return any(getattr(entry, "__name__", "") == "_CliPositionalArg" for entry in field.metadata)


def is_hidden(field: FieldInfo) -> bool:
    """Whether it is for tests only, which no help text or table shows: a `CliSuppress`."""
    return argparse.SUPPRESS in field.metadata


def _value_name(name: str, annotation: Any) -> str:
    values: list[str] = []
    for one in _plain_types(annotation):
        if get_origin(one) is Literal:
            values += map(str, get_args(one))
        elif get_origin(one) is tuple:
            values.append("NAME,..." if name.endswith(("name", "hosts", "origin")) else "ADDRESS,...")
        elif name.endswith(("listen", "bind", "leader")):
            values.append("ADDRESS")
        else:
            values.append("SECONDS" if name.endswith("_s") else _TYPE_TO_VALUE[one])
    return values[0] if len(values) == 1 else f"{{{','.join(values)}}}"


def _plain_types(annotation: Any) -> Iterator[Any]:
    """Without None."""
    if get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _plain_types(member)
    elif hasattr(annotation, "__metadata__"):
        yield from _plain_types(annotation.__origin__)
    elif annotation is not type(None):
        yield annotation


def _default(field: FieldInfo) -> str:
    default = field.default
    if field.is_required():
        return "" if is_positional(field) else " (required)"
    if default in (None, (), ""):
        return ""
    if isinstance(default, bool):
        return f" (default: {'on' if default else 'off'})"
    return f" (default: {','.join(default) if isinstance(default, tuple) else default})"
