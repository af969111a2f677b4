"""Clients' keys: which tenant a key's holder calls for, and what it may do.

The file names keys by their SHA-256 alone, so nobody can call with what it contains.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.v1 import common_pb2
from shared.errors import PermissionDeniedError, UnauthenticatedError, Violation
from shared.file_state import file_state, read_regular_file
from shared.tenants.tenant import DEFAULT_TENANT, Tenant

logger = logging.getLogger(__name__)

KEY_FORM = "1 to 512 visible ASCII characters"
_KEY = re.compile(r"[!-~]{1,512}")
# The scheme is written in any case. Source: RFC 9110, section 11.1; RFC 6750, section 2.1.
_BEARER = re.compile(r"bearer +([!-~]{1,512})", re.IGNORECASE)
_PRIORITIES = {
    "HIGH": common_pb2.PRIORITY_HIGH,
    "NORMAL": common_pb2.PRIORITY_NORMAL,
    "LOW": common_pb2.PRIORITY_LOW,
}
_TENANT_FIELDS = ("weight", "max_in_flight", "max_waiting_requests", "max_waiting_tokens")


class ClientKeysError(Exception):
    """The file cannot be used; the message says where and why, and has neither keys nor hashes."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client: on whose behalf it calls, and what it may do."""

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


def check_key(key: str, name: str) -> None:
    """Check the form of a key that something else than a file has; `name` is what has it.

    Raises:
        ValueError: it is no key.
    """
    if not _KEY.fullmatch(key):
        raise ValueError(f"{name}: must be a key of {KEY_FORM}")


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


def _read(path: Path) -> dict[bytes, Client]:
    """The clients by the digests of their keys."""
    # Imported here because few processes have such a file, and importing it is slow.
    from shared.tenants.client_key_lines import parse_line  # noqa: PLC0415

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
            line = parse_line(text)
            client = Client(line.of_tenant(), _PRIORITIES[line.max_priority], line.is_operator)
            digest = bytes.fromhex(line.sha256)
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


def _check_agreement(tenant: Tenant, earlier: Tenant) -> None:
    for name in _TENANT_FIELDS:
        if getattr(tenant, name) != getattr(earlier, name):
            raise ValueError(f"{name}: an earlier line of the same tenant has another one")
