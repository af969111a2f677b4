"""Settings: one frozen model per service; flags override the environment, which overrides defaults.

Nothing else reads the environment.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, NoDecode, SettingsConfigDict, SettingsError

from shared.settings_help import is_positional, name_values

logger = logging.getLogger(__name__)

_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})


def check_address(address: str) -> str:
    """Return `unix:PATH` or `HOST:PORT` unchanged.

    Raises:
        ValueError: it is neither.
    """
    if address.startswith("unix:"):
        if len(address) > len("unix:"):
            return address
        raise ValueError("unix: needs a path after it")
    host, separator, port = address.rpartition(":")
    if separator and host and port.isdecimal() and int(port) < 65536:
        return address
    raise ValueError("must be unix:PATH or HOST:PORT")


def check_local_address(address: str) -> str:
    """Return an address unchanged if only this machine can reach it.

    Raises:
        ValueError: it is no address, or neither a unix socket nor loopback.
    """
    check_address(address)
    if address.startswith("unix:") or address.rpartition(":")[0] in _LOOPBACK_HOSTS:
        return address
    raise ValueError("connections are not encrypted yet: use a unix socket, loopback, or --insecure-bind")


def split_list(value: object) -> object:
    """Split a comma-separated text; return anything else unchanged."""
    return tuple(value.split(",")) if isinstance(value, str) else value


Address = Annotated[str, AfterValidator(check_address)]
LocalAddress = Annotated[str, AfterValidator(check_local_address)]
# `A,B` on the command line and in the environment.
Addresses = Annotated[tuple[Address, ...], NoDecode, BeforeValidator(split_list)]

# How a worker proposes draft tokens.
DraftProposerName = Literal["none", "ngram", "mtp", "model"]


class ServiceSettings(BaseSettings):
    """The settings that every service has. Subclasses set `env_prefix` and `cli_prog_name`."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", cli_kebab_case=True, cli_implicit_flags=True, cli_avoid_json=True
    )

    listen: LocalAddress = Field(description="Address to serve on: unix:PATH, or HOST:PORT on loopback.")
    insecure_bind: Address | None = Field(
        default=None,
        description="Serve unencrypted on this address instead of --listen; any host that can reach it may connect.",
    )
    reflection: bool = Field(default=False, description="Serve gRPC reflection.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest severity of the log records that are written."
    )
    log_format: Literal["text", "json"] = Field(default="text", description="Format of log records.")

    @property
    def bind_address(self) -> str:
        """The address actually bound."""
        return self.insecure_bind or self.listen


class ProcessSettings(ServiceSettings):
    """The settings that every service has and the launcher has not."""

    manage_listen: Address | None = Field(
        default=None,
        description="Address for metrics and probes: GET /metrics, /livez, /readyz and /startupz over plain HTTP. Any "
        "host that can reach it may read them.",
    )


SettingsT = TypeVar("SettingsT", bound=BaseSettings)


def load_settings(settings_type: type[SettingsT], argv: Sequence[str] | None = None) -> SettingsT:
    """Read a service's settings; an invalid one is named on stderr, with exit code 2.

    Exits under `python -O` too, which removes assertions and with them a cell's integrity checks.

    Args:
        argv: Without the program's name; None means the process's own.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not __debug__:
        sys.stderr.write("error: python -O (or PYTHONOPTIMIZE) removes the integrity checks: run without it\n")
        raise SystemExit(2)
    flags = CliSettingsSource[Any](settings_type)
    name_values(flags.root_parser, settings_type)
    try:
        return CliApp.run(settings_type, cli_args=args, cli_settings_source=flags)
    except ValidationError as error:
        lines = [_explain(settings_type, details["loc"], details["msg"]) for details in error.errors()]
    except SettingsError as error:
        lines = [str(error)]
    sys.stderr.write("".join(f"error: {line}\n" for line in lines))
    raise SystemExit(2)


def log_settings(settings: ServiceSettings) -> None:
    """Log the configuration; warns if other machines may reach the service."""
    logger.info("settings", extra=settings.model_dump(mode="json"))
    if settings.insecure_bind is not None:
        logger.warning("serving without encryption", extra={"address": settings.insecure_bind})


def _explain(settings_type: type[BaseSettings], location: tuple[int | str, ...], message: str) -> str:
    if not location:
        return message.removeprefix("Value error, ")
    name = str(location[0])
    if name in settings_type.model_fields and is_positional(settings_type.model_fields[name]):
        return f"{name.upper()}: {message.removeprefix('Value error, ')}"
    variable = f"{settings_type.model_config.get('env_prefix', '')}{name}".upper()
    return f"--{name.replace('_', '-')} (or {variable}): {message.removeprefix('Value error, ')}"
