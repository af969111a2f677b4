"""Settings that say which workers make up the cell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from services.scheduler.core.policy import CellTopology
from shared.config import ServiceSettings
from shared.file_state import read_regular_file
from shared.network.addresses import LOOPBACK_HOSTS, check_host_and_port
from shared.setting_types import Addresses

# The value of a label. Source: Kubernetes, Labels and Selectors, "Syntax and character set".
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
# A label of DNS: the name of a service, a namespace or a port. Source: RFC 1123, section 2.1.
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_COMMON = frozenset({"max_dp", "discovery_period_s"})
# The settings of each kind: those without which it cannot work, and those that it also takes.
_REQUIRED = {
    "static": frozenset[str](),
    "dns": frozenset({"max_dp", "discovery_name"}),
    "kubernetes": frozenset({"max_dp", "discovery_service", "discovery_port"}),
}
_TAKEN = {
    "static": frozenset({"workers"}),
    "dns": _COMMON | {"discovery_name"},
    "kubernetes": _COMMON
    | {
        "discovery_service",
        "discovery_namespace",
        "discovery_port",
        "discovery_api_server",
        "discovery_service_account",
        "discovery_zone",
    },
}
_PERIOD_S = {"static": 0.0, "dns": 5.0, "kubernetes": 30.0}


def check_label(name: str) -> str:
    """Return a label of DNS unchanged.

    Raises:
        ValueError: it is none.
    """
    if _LABEL.fullmatch(name):
        return name
    raise ValueError("must be a name of lower-case letters, digits and -")


def check_zone(name: str) -> str:
    """Return a zone's name unchanged.

    Raises:
        ValueError: no node can have it.
    """
    if _LABEL_VALUE.fullmatch(name):
        return name
    raise ValueError("must be a zone's name, as nodes have it in the label topology.kubernetes.io/zone")


def check_port(port: str) -> str:
    """Return a port's name or number unchanged.

    Raises:
        ValueError: it is neither.
    """
    if port.isdecimal():
        if 0 < int(port) < 65536:
            return port
        raise ValueError("a port's number is 1 to 65535")
    return check_label(port)


def check_api_server(url: str) -> str:
    """Return the URL of an API server unchanged.

    Raises:
        ValueError: it is none, or the token would be sent to it unencrypted.
    """
    parts = urlsplit(url)
    if parts.scheme == "https" and parts.hostname:
        return url
    if parts.scheme == "http" and parts.hostname in LOOPBACK_HOSTS:
        return url
    raise ValueError("must be https://HOST, or http:// on loopback")


class MembershipSettings(ServiceSettings):
    """The workers' addresses, or how they are found."""

    workers: Addresses = Field(
        default=("127.0.0.1:50053",),
        description="Addresses of the groups' first workers, by DP rank, separated by commas.",
    )
    coupled: bool = Field(
        default=False,
        description="The workers share collectives across DP ranks (expert parallelism): they run in lockstep and are "
        "one failure domain.",
    )
    discovery: Literal["static", "dns", "kubernetes"] = Field(
        default="static",
        description="How workers are found: static (--workers), dns (the addresses of --discovery-name) or kubernetes "
        "(the EndpointSlices of --discovery-service). The last two are for workers that are not coupled and come and "
        "go.",
    )
    max_dp: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="The most workers that a cell which discovers them takes, counting those that still drain; further "
        "ones stay idle until a place is free.",
    )
    discovery_name: Annotated[str, AfterValidator(check_host_and_port)] | None = Field(
        default=None, description="HOST:PORT, where the name of the host has an address for each worker."
    )
    discovery_period_s: float | None = Field(
        default=None,
        ge=0.1,
        le=3600,
        allow_inf_nan=False,
        description="Seconds between two look-ups of --discovery-name (5 by default), or between two lists of "
        "EndpointSlices, which are watched in between (30 by default).",
    )
    discovery_service: Annotated[str, AfterValidator(check_label)] | None = Field(
        default=None, description="The Kubernetes Service whose EndpointSlices name the workers."
    )
    discovery_namespace: Annotated[str, AfterValidator(check_label)] | None = Field(
        default=None, description="Namespace of --discovery-service; by default the pod's own."
    )
    discovery_port: Annotated[str, AfterValidator(check_port)] | None = Field(
        default=None, description="The workers' port: its name in the Service, or its number."
    )
    discovery_api_server: Annotated[str, AfterValidator(check_api_server)] = Field(
        default="https://kubernetes.default.svc", description="URL of the Kubernetes API server."
    )
    discovery_service_account: Path = Field(
        default=_SERVICE_ACCOUNT,
        description="Directory with token and ca.crt of a service account that may list and watch EndpointSlices, and "
        "with the pod's namespace.",
    )
    discovery_zone: Annotated[str, AfterValidator(check_zone)] | None = Field(
        default=None,
        description="Zone whose workers get places first when there are more than --max-dp; one that has a place keeps "
        "it. Both schedulers of a cell need the same zone, or each may take workers that the other does not know.",
    )

    @model_validator(mode="after")
    def _check_workers(self) -> MembershipSettings:
        if len(set(self.workers)) < len(self.workers):
            raise ValueError("--workers names an address twice")
        return self

    @model_validator(mode="after")
    def _check_discovery(self) -> MembershipSettings:
        kind = self.discovery
        if self.coupled and kind != "static":
            raise ValueError(f"--coupled cannot be used with --discovery {kind}: coupled workers do not come and go")
        for name in sorted(_REQUIRED[kind]):
            if getattr(self, name) is None:
                raise ValueError(f"--discovery {kind} needs {_flag(name)}")
        others = frozenset().union(*_TAKEN.values()) - _TAKEN[kind]
        for name in sorted(others & self.model_fields_set):
            raise ValueError(f"{_flag(name)} cannot be used with --discovery {kind}")
        if kind == "kubernetes":
            self._check_service_account()
        return self

    @property
    def topology(self) -> CellTopology:
        """The DP ranks, and which of them fail together."""
        if self.max_dp is not None:
            return CellTopology(self.max_dp, is_dynamic=True, preferred_zone=self.discovery_zone)
        return CellTopology(len(self.workers), is_coupled=self.coupled and len(self.workers) > 1)

    @property
    def discovery_period(self) -> float:
        """`discovery_period_s`, or its default for this kind of discovery."""
        return _PERIOD_S[self.discovery] if self.discovery_period_s is None else self.discovery_period_s

    @property
    def namespace(self) -> str:
        """The namespace of `discovery_service`."""
        if self.discovery_namespace is not None:
            return self.discovery_namespace
        return read_regular_file(self.discovery_service_account / "namespace").decode().strip()

    def _check_service_account(self) -> None:
        try:
            check_label(self.namespace)
            read_regular_file(self.discovery_service_account / "token")
            if self.discovery_api_server.startswith("https:"):
                read_regular_file(self.discovery_service_account / "ca.crt")
        except OSError as error:
            raise ValueError(f"--discovery-service-account: {error.filename}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"--discovery-service-account: namespace: {error}") from error


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
