"""Clients' keys: which tenant a key's holder calls for, and what it may do.

The file names keys by their SHA-256 alone, so nobody can call with what it contains.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from lockstep.v1 import common_pb2
from shared.errors import PermissionDeniedError, UnauthenticatedError, Violation
from shared.file_state import file_state, read_regular_file
from shared.tenant import DEFAULT_TENANT, MAX_WEIGHT, MIN_WEIGHT, Tenant

logger = logging.getLogger(__name__)

KEY_FORM = "1 to 512 visible ASCII characters"
_KEY = re.compile(r"[!-~]{1,512}")
# The scheme is written in any case. Source: RFC 9110, section 11.1; RFC 6750, section 2.1.
_BEARER = re.compile(r"bearer +([!-~]{1,512})", re.IGNORECASE)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.IGNORECASE)
_TENANT_NAME = re.compile(r"[!-~]{1,64}")
# Other names may be anything, a key among them.
_FIELD_NAME = re.compile(r"[a-z_]{1,32}")
_PRIORITIES = {
    "HIGH": common_pb2.PRIORITY_HIGH,
    "NORMAL": common_pb2.PRIORITY_NORMAL,
    "LOW": common_pb2.PRIORITY_LOW,
}
_TENANT_FIELDS = ("weight", "max_in_flight", "max_waiting_requests", "max_waiting_tokens")
_MAX_IN_FLIGHT = 2**32 - 1
_MAX_WAITING_TOKENS = 2**63 - 1


class ClientKeysError(Exception):
    """The file cannot be used; the message says where and why, and has neither keys nor hashes."""


@dataclass(frozen=True, slots=True)
class Client:
    """On whose behalf a client calls, and what it may do."""

    tenant: Tenant
    max_priority: common_pb2.Priority
    """The highest that its requests may have."""
    is_operator: bool = False

    def resolve_priority(self, requested: common_pb2.Priority) -> common_pb2.Priority:
        """The priority asked for; without one, NORMAL or what the key allows, whichever is lower.

        Raises:
            PermissionDeniedError: it is above the key's.
        """
        # A higher priority has the lower number.
        if requested == common_pb2.PRIORITY_UNSPECIFIED:
            return max(common_pb2.PRIORITY_NORMAL, self.max_priority)
        if common_pb2.PRIORITY_UNSPECIFIED < requested < self.max_priority:
            highest = common_pb2.Priority.Name(self.max_priority)
            raise PermissionDeniedError("the key does not allow this priority", max_priority=highest)
        return requested

    def check_num_choices(self, n: int, num_prompts: int, violations: list[Violation]) -> None:
        """Refuse a request with more choices than the tenant may ever have in flight."""
        limit = self.tenant.max_in_flight
        if limit is None or n * num_prompts <= limit:
            return
        if n > limit or num_prompts == 1:
            violations.append(Violation("sampling.n", "OUT_OF_RANGE", f"must be at most {limit} with this key"))
        else:
            description = f"must be at most {limit} with this key, each counted sampling.n times"
            violations.append(Violation("prompts.prompts", "OUT_OF_RANGE", description))


ANY_CLIENT = Client(DEFAULT_TENANT, common_pb2.PRIORITY_HIGH)
"""Every client of a port without keys."""


class ClientKeys:
    """The keys of the last file that could be read, for one thread.

    A call looks whether the file has changed, by its name: so it may be replaced, as may a symlink on its way. Calls
    that have begun go on when their key is withdrawn.
    """

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ClientKeysError: it cannot be read, has no key, or a line of it is wrong.
        """
        self._path = path
        self._state = file_state(path)
        self._digest_to_client = _read(path)
        self._is_stale = False

    @property
    def num_keys(self) -> int:
        """How many keys are accepted."""
        return len(self._current())

    @property
    def is_stale(self) -> bool:
        """Whether the keys are an earlier file's, because the present one is gone or cannot be used."""
        self._current()
        return self._is_stale

    def identify(self, authorizations: Sequence[str], api_keys: Sequence[str]) -> Client:
        """Who calls with these values of `authorization` and `x-api-key`.

        Raises:
            UnauthenticatedError: there is no key, an unknown one, or more than one.
        """
        keys = _given_keys(authorizations, api_keys)
        if not keys:
            raise UnauthenticatedError("a key is needed, as `authorization: Bearer KEY` or `x-api-key: KEY`")
        if len(keys) > 1:
            raise UnauthenticatedError("the call has two different keys")
        client = self._find(keys.pop())
        if client is None:
            raise UnauthenticatedError("the key is not known")
        return client

    def _find(self, key: str) -> Client | None:
        """The holder of a key.

        The time that this takes says nothing of any key: what is compared are digests, and how far that of a guess
        agrees with a stored one does not bring the next guess closer. Besides, the table compares only digests whose
        hashes, which each process salts anew, are equal.
        """
        return self._current().get(hashlib.sha256(key.encode()).digest())

    def _current(self) -> dict[bytes, Client]:
        state = file_state(self._path)
        if state != self._state:
            self._state = state
            self._read_again()
        return self._digest_to_client

    def _read_again(self) -> None:
        try:
            self._digest_to_client = _read(self._path)
        except ClientKeysError as error:
            self._is_stale = True
            logger.warning("changed client keys are not used", extra={"error": str(error)})
        else:
            self._is_stale = False
            logger.info("client keys read again", extra={"num_keys": len(self._digest_to_client)})


def read_key_file(path: Path) -> str:
    """A client's own key: the file's only line.

    Raises:
        ClientKeysError: it cannot be read, or is no key.
    """
    try:
        key = read_regular_file(path).decode("ascii").strip("\r\n")
    except OSError as error:
        raise ClientKeysError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError:
        key = ""
    if not _KEY.fullmatch(key):
        raise ClientKeysError(f"{path}: must have one line, the key of {KEY_FORM}")
    return key


def _given_keys(authorizations: Sequence[str], api_keys: Sequence[str]) -> set[str]:
    keys = set(api_keys)
    if not all(map(_KEY.fullmatch, keys)):
        raise UnauthenticatedError(f"x-api-key is not a key of {KEY_FORM}")
    for value in authorizations:
        match = _BEARER.fullmatch(value)
        if match is None:
            raise UnauthenticatedError(f"the authorization is not `Bearer KEY`, with a key of {KEY_FORM}")
        keys.add(match[1])
    return keys


def _check_digest(text: str) -> str:
    if not _DIGEST.fullmatch(text):
        raise ValueError("must be 64 hexadecimal digits")
    return text


def _check_tenant_name(text: str) -> str:
    if not _TENANT_NAME.fullmatch(text):
        raise ValueError("must be 1 to 64 visible ASCII characters")
    return text


class _Line(BaseModel):
    """One line of the file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    sha256: Annotated[str, AfterValidator(_check_digest)]
    tenant: Annotated[str, AfterValidator(_check_tenant_name)]
    weight: float = Field(default=1.0, ge=MIN_WEIGHT, le=MAX_WEIGHT, allow_inf_nan=False)
    max_in_flight: int | None = Field(default=None, ge=1, le=_MAX_IN_FLIGHT)
    max_waiting_requests: int | None = Field(default=None, ge=1, le=_MAX_IN_FLIGHT)
    max_waiting_tokens: int | None = Field(default=None, ge=1, le=_MAX_WAITING_TOKENS)
    max_priority: Literal["HIGH", "NORMAL", "LOW"] = "NORMAL"
    is_operator: bool = False

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_null(cls, value: object) -> object:
        if value is None:
            raise ValueError("must not be null; leave it out")
        return value

    def client(self) -> Client:
        """What the line says of its key."""
        tenant = Tenant(
            self.tenant,
            self.weight,
            max_in_flight=self.max_in_flight,
            max_waiting_requests=self.max_waiting_requests,
            max_waiting_tokens=self.max_waiting_tokens,
        )
        return Client(tenant, _PRIORITIES[self.max_priority], self.is_operator)


def _read(path: Path) -> dict[bytes, Client]:
    """The clients by the digests of their keys."""
    try:
        lines = read_regular_file(path).decode().split("\n")
    except OSError as error:
        raise ClientKeysError(f"--client-keys {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ClientKeysError(f"--client-keys {path}: not UTF-8") from None
    digest_to_client: dict[bytes, Client] = {}
    name_to_tenant: dict[str, Tenant] = {}
    for number, text in enumerate(lines, 1):
        if not text.strip() or text.startswith("#"):
            continue
        try:
            line = _parse(text)
            digest, client = bytes.fromhex(line.sha256), line.client()
            if digest in digest_to_client:
                raise ValueError("sha256: an earlier line has the same")
            _check_agreement(client.tenant, name_to_tenant.setdefault(line.tenant, client.tenant))
        except ValueError as error:
            raise ClientKeysError(f"--client-keys {path}, line {number}: {error}") from None
        digest_to_client[digest] = client
    if not digest_to_client:
        # An empty file is more likely being written than meant to lock everybody out.
        raise ClientKeysError(f"--client-keys {path}: it has no key")
    return digest_to_client


def _parse(text: str) -> _Line:
    """Parse one line; the message of an error quotes none of its values."""
    try:
        value = json.loads(text, object_pairs_hook=_make_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(str(error) if isinstance(error, _RepeatedNameError) else "not valid JSON") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    try:
        return _Line.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_input=False, include_url=False)[0]
        name = str(details["loc"][0])
        if details["type"] == "extra_forbidden":
            raise ValueError(f"unknown field{f' {name}' if _FIELD_NAME.fullmatch(name) else ''}") from None
        message = details["msg"].removeprefix("Value error, ").replace("Input should", "must")
        raise ValueError(f"{name}: {message}") from None


class _RepeatedNameError(ValueError):
    """A JSON object has a field twice."""


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise _RepeatedNameError("a field is there twice")
    return value


def _check_agreement(tenant: Tenant, earlier: Tenant) -> None:
    for name in _TENANT_FIELDS:
        if getattr(tenant, name) != getattr(earlier, name):
            raise ValueError(f"{name}: an earlier line of the same tenant has another one")
