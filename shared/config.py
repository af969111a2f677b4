"""Settings: one frozen model per service; flags override the environment, which overrides defaults.

Nothing else reads the environment.
"""

from __future__ import annotations

import logging
import sys
from argparse import SUPPRESS, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, PrivateAttr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    InitSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from shared.flag_parser import FlagParser
from shared.network.tls import Certificates, Role, TlsError, TlsFiles
from shared.process.encoding import describe_locale, is_text
from shared.setting_types import Address, ListenAddress, check_trust_domain
from shared.settings_help import is_positional, name_values
from shared.tenants.client_keys import ClientKeys, ClientKeysError

logger = logging.getLogger(__name__)


class ServiceSettings(BaseSettings):
    """The settings that every service has. Subclasses set `env_prefix` and `cli_prog_name`."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", cli_kebab_case=True, cli_implicit_flags=True, cli_avoid_json=True
    )

    role: ClassVar[Role]
    """What the service's certificate must name."""

    tls_cert: Path | None = Field(
        default=None,
        description="Certificate for TLS, in PEM, then any intermediate ones. It names the service's role: DNS "
        "ROLE.DOMAIN and URI spiffe://DOMAIN/ROLE. New files are used by new connections.",
    )
    tls_key: Path | None = Field(default=None, description="Private key of --tls-cert, in PEM, not encrypted.")
    tls_ca: Path | None = Field(
        default=None, description="Certificates of the authorities that sign those of all services, in PEM."
    )
    trust_domain: Annotated[str, AfterValidator(check_trust_domain)] | None = Field(
        default=None, description="DOMAIN in the names of all services' certificates, such as cell.example.org."
    )
    listen: ListenAddress = Field(
        description="Address to serve on: unix:PATH, HOST:PORT on loopback, or with TLS any HOST:PORT."
    )
    insecure_bind: Address | None = Field(
        default=None,
        description="Serve unencrypted on this address instead of --listen; any host that can reach it may connect.",
    )
    reflection: bool = Field(default=False, description="Serve gRPC reflection.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest severity of the log records that are written."
    )
    log_format: Literal["text", "json"] = Field(default="text", description="Format of log records.")

    _certificates: Certificates | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        cert, key, ca, trust_domain = self.tls_cert, self.tls_key, self.tls_ca, self.trust_domain
        if cert is None and key is None and ca is None and trust_domain is None:
            return self
        if cert is None or key is None or ca is None or trust_domain is None:
            raise ValueError("--tls-cert, --tls-key, --tls-ca and --trust-domain must be used together")
        if self.insecure_bind is not None:
            raise ValueError("--insecure-bind cannot be used with TLS: --listen then takes any address")
        try:
            files = TlsFiles(cert, key, ca, trust_domain, self.client_authority)
            self._certificates = Certificates(files, self.role)
        except TlsError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def client_authority(self) -> Path | None:
        """The file of the authorities of clients' certificates; None if clients need none."""
        return None

    @property
    def certificates(self) -> Certificates | None:
        """Certificates for TLS; None means that links are not encrypted."""
        return self._certificates

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


class ClientPortSettings(ServiceSettings):
    """The settings of a service with a client port."""

    max_connection_age_s: float | None = Field(
        default=None,
        ge=1.0,
        allow_inf_nan=False,
        description="A client's connection older than this many seconds, within 10 %, takes no new calls and ends "
        "after its open ones; the client connects again, perhaps to another replica. Connections last if not set.",
    )
    client_keys: Path | None = Field(
        default=None,
        description="File of the keys that clients need, in JSON lines: a key's SHA-256, its tenant and limits. It is "
        "read again when it changes. Clients need no key if not set.",
    )
    client_ca: Path | None = Field(
        default=None,
        description="Certificates of the authorities that sign those of clients, in PEM: with TLS, gRPC's clients then "
        "need a certificate, and HTTP's may show one. The file is read again when it changes.",
    )

    _keys: ClientKeys | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if self.client_keys is not None:
            try:
                self._keys = ClientKeys(self.client_keys)
            except ClientKeysError as error:
                raise ValueError(str(error)) from error
        return self

    @model_validator(mode="after")
    def _check_client_ca(self) -> Self:
        if self.client_ca is None:
            return self
        if self._certificates is None:
            raise ValueError("--client-ca needs TLS: --tls-cert, --tls-key, --tls-ca and --trust-domain")
        if self.bind_address.startswith("unix:"):
            raise ValueError("--client-ca cannot be used with a unix socket as --listen: it has no TLS")
        return self

    @property
    def client_authority(self) -> Path | None:
        """See `ServiceSettings`."""
        return self.client_ca

    @property
    def keys(self) -> ClientKeys | None:
        """The keys that clients need; None if they need none."""
        return self._keys


class HttpPortSettings(ClientPortSettings):
    """The settings of a service that also has a port for the HTTP API."""

    http_listen: ListenAddress | None = Field(
        default=None,
        description="Address of the HTTP API (OpenAI's): unix:PATH, HOST:PORT on loopback, or with TLS any HOST:PORT. "
        "Not served if not set.",
    )
    insecure_http_bind: Address | None = Field(
        default=None,
        description="Serve the HTTP API unencrypted on this address instead of --http-listen; any host that can reach "
        "it may connect.",
    )

    @property
    def http_address(self) -> str | None:
        """The address of the HTTP API; None if there is none."""
        return self.insecure_http_bind or self.http_listen


class SchedulerLossSettings(BaseSettings):
    """The tokenizer's setting that its launcher reads too, to restart a scheduler in time."""

    model_config = SettingsConfigDict(
        frozen=True, env_prefix="LOCKSTEP_TOKENIZER_", cli_kebab_case=True, cli_prog_name="lockstep serve"
    )

    scheduler_lost_s: float = Field(
        default=60.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Seconds that requests in flight wait for a scheduler after theirs is lost. A scheduler that is up "
        "but still waiting for its workers does not count as lost.",
    )


SettingsT = TypeVar("SettingsT", bound=BaseSettings)


def load_settings(
    settings_type: type[SettingsT],
    argv: Sequence[str] | None = None,
    *,
    more_flags: Sequence[str] = (),
    file_values: Mapping[str, Any] | None = None,
) -> SettingsT:
    """Read a service's settings; an invalid one is named on stderr, with exit code 2.

    Exits under `python -O` too, which removes assertions and with them a cell's integrity checks.

    Args:
        argv: Without the program's name; None means the process's own.
        more_flags: Flags that others read, for what is said of an unknown one.
        file_values: Values of a file, by the names of fields, which the environment overrides.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not __debug__:
        sys.stderr.write("error: python -O (or PYTHONOPTIMIZE) removes the integrity checks: run without it\n")
        raise SystemExit(2)
    if file_values:
        settings_type = _with_file(settings_type, file_values)
    flags = _make_flags(settings_type, more_flags)
    for action in flags.root_parser._actions:
        if not action.option_strings and action.dest in (file_values or {}):
            action.nargs, action.required, action.default = "?", False, SUPPRESS
    no_text = f"not UTF-8{describe_locale()}"
    try:
        settings = CliApp.run(settings_type, cli_args=args, cli_settings_source=flags)
        lines = [_explain(settings_type, (name,), no_text) for name in _find_no_texts(settings)]
        if not lines:
            return settings
    except ValidationError as error:
        problems = [
            (details["loc"], no_text if details["type"] == "string_unicode" else details["msg"])
            for details in error.errors()
        ]
        lines = [_explain(settings_type, location, message) for location, message in problems]
    except SettingsError as error:
        lines = [str(error)]
    sys.stderr.write("".join(f"error: {line}\n" for line in lines))
    raise SystemExit(2)


def log_settings(settings: ServiceSettings) -> None:
    """Log the settings that differ from their defaults; warns if other machines may reach the service."""
    logger.info("settings", extra=settings.model_dump(mode="json", exclude_defaults=True))
    if settings.insecure_bind is not None:
        logger.warning("serving without encryption", extra={"address": settings.insecure_bind})


def _with_file(settings_type: type[SettingsT], values: Mapping[str, Any]) -> type[SettingsT]:
    """The same settings, whose last source is a file's values."""

    def settings_customise_sources(
        _: type[BaseSettings], /, settings_cls: type[BaseSettings], init_settings: Any, env_settings: Any, **__: Any
    ) -> tuple[Any, ...]:
        return init_settings, env_settings, InitSettingsSource(settings_cls, dict(values))

    body = {
        "__doc__": settings_type.__doc__,
        "__module__": settings_type.__module__,
        "settings_customise_sources": classmethod(settings_customise_sources),
    }
    return type(settings_type.__name__, (settings_type,), body)


def make_parser(settings_type: type[BaseSettings]) -> FlagParser:
    """The parser of the settings' flags."""
    parser = _make_flags(settings_type, ()).root_parser
    assert isinstance(parser, FlagParser)
    return parser


def _make_flags(settings_type: type[BaseSettings], more_flags: Sequence[str]) -> CliSettingsSource[Any]:
    """The flags of settings, in a parser of ours."""
    parser = FlagParser(
        prog=settings_type.model_config["cli_prog_name"],
        description=cleandoc(settings_type.__doc__ or ""),
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.more_flags = more_flags
    # Their names are those of the library's own parser.
    flags = CliSettingsSource[Any](settings_type, root_parser=parser, parse_args_method=FlagParser.parse_args)
    name_values(parser, settings_type)
    return flags


def _find_no_texts(settings: BaseSettings) -> list[str]:
    """The names of settings with bytes that are not UTF-8: gRPC and the libraries that read models take only text."""
    values = ((name, getattr(settings, name)) for name in type(settings).model_fields)
    name_to_texts = {name: value if isinstance(value, tuple) else (value,) for name, value in values}
    return [name for name, texts in name_to_texts.items() if not all(is_text(str(text)) for text in texts)]


def _explain(settings_type: type[BaseSettings], location: tuple[int | str, ...], message: str) -> str:
    if not location:
        return message.removeprefix("Value error, ")
    name = str(location[0])
    if name in settings_type.model_fields and is_positional(settings_type.model_fields[name]):
        return f"{name.upper()}: {message.removeprefix('Value error, ')}"
    variable = f"{settings_type.model_config.get('env_prefix', '')}{name}".upper()
    return f"--{name.replace('_', '-')} (or {variable}): {message.removeprefix('Value error, ')}"
