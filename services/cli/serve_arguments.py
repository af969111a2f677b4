"""Reads the arguments of `lockstep serve`: its own, those for the services, other servers' flags, and a file's."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.cli.api_key import API_KEY_VARIABLE, take_api_key
from services.cli.flags.config_file import load_config_file
from services.cli.flags.foreign_flags import ALIAS_NAMES, ForeignFlagError, translate
from services.cli.launcher_settings import flags_of_roles
from services.cli.processes.preflight import RefusedError
from services.cli.processes.service_command import ROLES
from services.cli.serve_settings import ServeSettings, split_service_flags
from shared.config import load_settings


@dataclass(frozen=True, slots=True)
class ServeArguments:
    """What a start is given."""

    settings: ServeSettings
    service_flags: Mapping[str, Sequence[str]]
    argv: Sequence[str]
    """As they were given, in our words and without a key."""
    helped_role: str | None
    """The service whose help is asked for."""


def read_serve_arguments(argv: Sequence[str]) -> ServeArguments:
    """Read arguments; a key among them is hidden from those who list processes.

    Raises:
        SystemExit: they cannot be meant, as stderr says; or help was printed.
    """
    argv = take_api_key(argv)
    try:
        argv = translate(argv)
        file = load_config_file(argv, ServeSettings, ROLES)
    except (ForeignFlagError, RefusedError) as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None
    own_args, service_flags = split_service_flags([*file.service_flags, *argv])
    helped = next((role for role, flags in service_flags.items() if not {"--help", "--h"}.isdisjoint(flags)), None)
    if (key := os.environ.get(API_KEY_VARIABLE)) is not None:
        own_args.append(f"--api-key={key}")
    if helped is not None:
        # A model need not be named.
        return ServeArguments(ServeSettings.model_construct(), service_flags, argv, helped)
    others_flags = [*flags_of_roles(ROLES), *ALIAS_NAMES]
    settings = load_settings(ServeSettings, own_args, more_flags=others_flags, file_values=file.own)
    return ServeArguments(settings, service_flags, argv, None)
