"""The file of `--config`, in YAML: a launcher's settings, and one section for the flags of each service.

    model-dir: org/name
    tp: 2
    worker:
      ops-backend: native

A value here is overridden by the environment, and that by a flag, of the launcher and of each service.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings, YamlConfigSettingsSource

from services.cli.extras import missing_packages
from services.cli.processes.preflight import RefusedError
from services.cli.processes.service_flags import ROLE_TO_FLAGS
from shared.flag_parser import find_like


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file says; empty without one."""

    own: Mapping[str, Any] = field(default_factory=dict)
    """The launcher's settings, by the names of their fields."""
    service_flags: Sequence[str] = ()
    """Flags of services, as `--ROLE.NAME=VALUE`, without those that the environment overrides."""


def load_config_file(argv: Sequence[str], settings_type: type[BaseSettings], roles: Iterable[str]) -> ConfigFile:
    """What the file says that a launcher's arguments, or else its environment, name.

    Raises:
        RefusedError: see `read_config_file`.
    """
    path = _find(argv, settings_type.model_config.get("env_prefix", ""))
    if path is None:
        return ConfigFile()
    command = str(settings_type.model_config["cli_prog_name"]).removeprefix("lockstep ")
    return read_config_file(path, command, settings_type.model_fields, roles)


def _find(argv: Sequence[str], env_prefix: str) -> Path | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        found = parser.parse_known_args(argv)[0].config or os.environ.get(f"{env_prefix}CONFIG")
    except argparse.ArgumentError:
        # The parser of all flags says what is wrong.
        return None
    return None if found is None else Path(found)


def read_config_file(path: Path, command: str, fields: Iterable[str], roles: Iterable[str]) -> ConfigFile:
    """Read a file for a launcher with these fields and services.

    Raises:
        RefusedError: it cannot be read, or has something else; the message names it.
    """
    if problem := missing_packages(command, ["config"]):
        raise RefusedError(problem)
    names = {*fields} - {"config", "api_key", "prompt"}
    sections = {*roles}
    own: dict[str, Any] = {}
    flags: list[str] = []
    for key, value in _read(path).items():
        name = str(key).replace("-", "_")
        if name in sections:
            flags += _service_flags(path, name, value)
        elif name in names:
            own[name] = value
        else:
            like = find_like(str(key), [each.replace("_", "-") for each in (*names, *sections)])
            advice = f"; did you mean {' or '.join(like)}?" if like else ""
            raise RefusedError(f"--config {path}: there is no setting {str(key)!r}{advice}")
    return ConfigFile({name: _as_text(value) for name, value in own.items() if value is not None}, flags)


def _read(path: Path) -> dict[Any, Any]:
    import yaml  # noqa: PLC0415 - an extra has it

    if not path.is_file():
        raise RefusedError(f"--config {path}: no such file")
    try:
        return dict(YamlConfigSettingsSource(BaseSettings, yaml_file=path).yaml_data)
    except (AttributeError, OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise RefusedError(f"--config {path}: {' '.join(str(error).split())}") from None


def _service_flags(path: Path, role: str, section: object) -> list[str]:
    if section is None:
        return []
    if not isinstance(section, dict):
        raise RefusedError(f"--config {path}: {role} must have settings below it")
    flags = []
    for key, value in section.items():
        name = str(key).replace("_", "-")
        variable = f"LOCKSTEP_{role}_{name.replace('-', '_')}".upper()
        if value in (None, []) or variable in os.environ:
            continue
        if isinstance(value, bool) and f"no-{name}" in ROLE_TO_FLAGS[role]:
            flags.append(f"--{role}.{name if value else f'no-{name}'}")
        else:
            text = str(value).lower() if isinstance(value, bool) else _as_text(value)
            flags.append(f"--{role}.{name}={text}")
    return flags


def _as_text(value: object) -> Any:
    """A list as a flag has it; anything else unchanged."""
    return ",".join(map(str, value)) if isinstance(value, list) and value else value
