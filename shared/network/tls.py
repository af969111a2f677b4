"""TLS: certificates that name roles, between services; those of clients; all read again when their files change.

A certificate names its role twice: as the DNS name ROLE.DOMAIN, which the side that dials checks instead of the
address, since addresses change; and as the URI spiffe://DOMAIN/ROLE, which the side that serves reads to decide what
its peer may call. Source: SPIFFE X.509-SVID, section 2.
"""

from __future__ import annotations

import enum
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import grpc

from shared.file_state import FileState, file_state, read_regular_file

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

logger = logging.getLogger(__name__)

# gRPC frees the former configuration as soon as it has a new one, although a handshake on another thread may be about
# to use it, which then ends the process. Such a handshake needs microseconds, and no other begins meanwhile.
_RENEWAL_S = 0.1


class Role(enum.Enum):
    """What a process is to the others; the value is in its certificate."""

    TOKENIZER = "tokenizer"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    OPERATOR = "operator"
    """A person or tool that watches and manages the cell."""


class TlsError(Exception):
    """The files cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What a service is given. All in PEM."""

    certificate: Path
    """Its certificate, then any intermediate ones."""
    key: Path
    """The certificate's private key, not encrypted."""
    authority: Path
    """The certificates that sign those of all services, its own included."""
    trust_domain: str
    """The domain in the names of all roles."""
    client_authority: Path | None = None
    """The certificates that sign those of clients; None means that clients need none."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """What the files of the services' certificates say, checked."""

    certificate: bytes
    own: bytes
    """`certificate` without intermediate ones."""
    key: bytes
    authority: bytes
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class _Contents:
    """What all files say."""

    pair: _Pair
    client_authority: bytes | None

    @property
    def trusted_clients(self) -> bytes | None:
        """What a client's certificate has to be, or to be signed by; None if clients need none.

        The service's own certificate is: with it the launcher asks whether the service serves.
        """
        return None if self.client_authority is None else self.client_authority + self.pair.own


class Certificates:
    """A service's certificate, key and authority, and its clients' authority: those of the last files that fit.

    Certificates are renewed by replacing the files. The next handshake reads them; open connections stay. Files that do
    not fit, as in the middle of a replacement, are logged once and tried again when they change.
    """

    def __init__(self, files: TlsFiles, role: Role) -> None:
        """Read the files.

        Raises:
            TlsError: they cannot be read, do not fit together, have expired, or do not name `role`; or the
                authority does not cover the certificate.
        """
        self._trust_domain = files.trust_domain
        self._pair = _Latest((files.certificate, files.key, files.authority), lambda: _read(files, role))
        path = files.client_authority
        self._client_authority = None if path is None else _Latest((path,), lambda: _read_client_authority(path))
        # gRPC's threads read too.
        self._lock = threading.Lock()

    @property
    def expires_at(self) -> datetime:
        """When the certificate in use ceases to be valid."""
        return self._current().pair.expires_at

    @property
    def num_failed_reads(self) -> int:
        """How often changed files did not fit."""
        self._current()
        clients = self._client_authority
        return self._pair.num_failed_reads + (0 if clients is None else clients.num_failed_reads)

    def server_credentials(self, *, on_cell_port: bool) -> grpc.ServerCredentials:
        """A gRPC server's credentials: peers of a cell port need a certificate, and clients if it has an authority."""

        def find() -> tuple[_Pair, bytes | None]:
            """What there is at present, and what peers need that are clients."""
            contents = self._current()
            return contents.pair, None if on_cell_port else contents.trusted_clients

        used = find()
        is_mutual = on_cell_port or used[1] is not None

        def renew() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC at every handshake, on its threads, one at a time."""
            nonlocal used
            if (newest := find()) == used:
                return None
            used = newest
            time.sleep(_RENEWAL_S)
            return _configuration(*newest)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(*used), renew, require_client_authentication=is_mutual
        )

    def make_http_context(self) -> ssl.SSLContext:
        """Make one for an HTTP server; a handshake uses the newest files that fit.

        Clients need no certificate. With an authority for those of clients, one that is shown is checked.
        """
        used = self._current()
        context = _load_context(used)

        def choose(handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            nonlocal context, used
            if (newest := self._current()) != used:
                context, used = _load_context(newest), newest
            handshake.context = context

        first = context
        first.sni_callback = choose
        return first

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a new channel, which keeps them."""
        pair = self._current().pair
        return grpc.ssl_channel_credentials(pair.authority, pair.key, pair.certificate)

    def name_of(self, role: Role) -> str:
        """The DNS name in the certificates of `role`."""
        return _dns_name(role, self._trust_domain)

    def role_of(self, context: grpc.ServicerContext) -> Role | None:
        """The role in the peer's certificate; None if it has none of this trust domain."""
        uris = {uri.decode(errors="replace") for uri in context.auth_context().get("peer_uri", ())}
        return next((role for role in Role if _uri(role, self._trust_domain) in uris), None)

    def _current(self) -> _Contents:
        with self._lock:
            if self._pair.refresh():
                logger.info("TLS files read again", extra={"expires_at": self._pair.value.expires_at.isoformat()})
            clients = self._client_authority
            if clients is None:
                return _Contents(self._pair.value, None)
            if clients.refresh():
                logger.info("authority of clients' certificates read again")
            return _Contents(self._pair.value, clients.value)


def _configuration(pair: _Pair, trusted_clients: bytes | None) -> grpc.ServerCertificateConfiguration:
    trusted = pair.authority if trusted_clients is None else trusted_clients
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)], trusted)


def _load_context(contents: _Contents) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # It takes files alone, and what the service's have now need not be good.
    with _file_of(contents.pair.certificate) as certificate, _file_of(contents.pair.key) as key:
        context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["http/1.1"])
    if contents.trusted_clients is not None:
        context.verify_mode = ssl.CERT_OPTIONAL
        # An authority need not be a root, as in gRPC.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(cadata=contents.trusted_clients.decode())
    return context


@contextmanager
def _file_of(data: bytes) -> Iterator[str]:
    """The path of a file in memory that has `data`."""
    with os.fdopen(os.memfd_create("pem"), "wb", buffering=0) as file:
        file.write(data)
        yield f"/proc/self/fd/{file.fileno()}"


_ValueT = TypeVar("_ValueT")


class _Latest(Generic[_ValueT]):
    """What files say that are read again when they change: the last that could be used."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], _ValueT]) -> None:
        """Read them.

        Raises:
            TlsError: by `read`.
        """
        self._paths = paths
        self._read = read
        self._state = self._stat()
        self.value = read()
        self.num_failed_reads = 0

    def refresh(self) -> bool:
        """Read the files if they have changed; returns whether `value` is new.

        If they cannot be used, that is logged, and `value` stays.
        """
        state = self._stat()
        if state == self._state:
            return False
        self._state = state
        try:
            self.value = self._read()
        except TlsError as error:
            self.num_failed_reads += 1
            logger.warning("changed TLS files are not used", extra={"error": str(error)})
            return False
        return True

    def _stat(self) -> tuple[FileState, ...]:
        return tuple(map(file_state, self._paths))


class TrustedAuthority:
    """What a client that has no role knows: who signs the certificates of servers, and its own one, if any."""

    def __init__(
        self, path: Path, trust_domain: str | None, *, certificate: Path | None = None, key: Path | None = None
    ) -> None:
        """Read the files, all in PEM.

        Args:
            path: The authority's certificates.
            trust_domain: The domain in the servers' names; None means that a server's certificate names its address.
            certificate: What it shows to servers that require a certificate, then any intermediate ones.
            key: The key of `certificate`, if that is given.

        Raises:
            TlsError: a file cannot be read, has no certificate or key, or the two do not fit together.
        """
        self._pem = _read_file("--tls-ca", path)
        _certificates("--tls-ca", path, self._pem)
        self._trust_domain = trust_domain
        self._key_and_certificate: tuple[bytes, bytes] | None = None
        if certificate is not None and key is not None:
            chain, pem = _read_file("--tls-cert", certificate), _read_file("--tls-key", key)
            own, *_ = _certificates("--tls-cert", certificate, chain)
            _check_key(own, certificate, pem, key)
            self._key_and_certificate = pem, chain

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a new channel."""
        return grpc.ssl_channel_credentials(self._pem, *(self._key_and_certificate or ()))

    def name_of(self, role: Role) -> str | None:
        """The DNS name in the certificates of `role`; None if it is the server's address."""
        return None if self._trust_domain is None else _dns_name(role, self._trust_domain)


def _read(files: TlsFiles, role: Role) -> _Pair:
    # Imported here, as in each function below, because only TLS needs it, and importing it is slow.
    from shared.network.certificates import is_covered, pem_of  # noqa: PLC0415

    certificate, key, authority = (
        _read_file(name, path)
        for name, path in (
            ("--tls-cert", files.certificate),
            ("--tls-key", files.key),
            ("--tls-ca", files.authority),
        )
    )
    own, *intermediate = _certificates("--tls-cert", files.certificate, certificate)
    trusted = _certificates("--tls-ca", files.authority, authority)
    _check_key(own, files.certificate, key, files.key)
    _check_names(own, files, role)
    if own.not_valid_after_utc <= datetime.now(UTC):
        raise TlsError(f"--tls-cert {files.certificate} expired at {own.not_valid_after_utc.isoformat()}")
    if not is_covered(own, intermediate, trusted):
        raise TlsError(
            f"--tls-ca {files.authority} does not cover --tls-cert {files.certificate}, "
            f"whose issuer is {own.issuer.rfc4514_string()}"
        )
    return _Pair(certificate, pem_of(own), key, authority, own.not_valid_after_utc)


def _read_client_authority(path: Path) -> bytes:
    from shared.network.certificates import pem_of  # noqa: PLC0415

    # Anything else in the file, such as comments, is left out.
    return b"".join(map(pem_of, _certificates("--client-ca", path, _read_file("--client-ca", path))))


def _check_key(own: Certificate, certificate_path: Path, key: bytes, key_path: Path) -> None:
    from shared.network.certificates import is_key_of  # noqa: PLC0415

    try:
        is_own = is_key_of(key, own)
    except ValueError as error:
        raise TlsError(f"--tls-key {key_path}: not an unencrypted private key in PEM") from error
    if not is_own:
        raise TlsError(f"--tls-key {key_path} is not the key of --tls-cert {certificate_path}")


def _read_file(name: str, path: Path) -> bytes:
    try:
        return read_regular_file(path)
    except OSError as error:
        raise TlsError(f"{name} {path}: {error.strerror}") from error


def _certificates(name: str, path: Path, data: bytes) -> list[Certificate]:
    from shared.network.certificates import read_certificates  # noqa: PLC0415

    try:
        return read_certificates(data)
    except ValueError as error:
        raise TlsError(f"{name} {path}: no certificate in PEM") from error


def _check_names(certificate: Certificate, files: TlsFiles, role: Role) -> None:
    from shared.network.certificates import names_in  # noqa: PLC0415

    dns_names, uris = names_in(certificate)
    dns_name, uri = _dns_name(role, files.trust_domain), _uri(role, files.trust_domain)
    if dns_name not in dns_names:
        raise TlsError(f"--tls-cert {files.certificate} lacks the DNS name {dns_name}")
    if uri not in uris:
        raise TlsError(f"--tls-cert {files.certificate} lacks the URI {uri}")


def _dns_name(role: Role, trust_domain: str) -> str:
    return f"{role.value}.{trust_domain}"


def _uri(role: Role, trust_domain: str) -> str:
    return f"spiffe://{trust_domain}/{role.value}"
