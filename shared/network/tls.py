"""TLS between services: certificates that name roles, read again when their files change.

A certificate names its role twice: as the DNS name ROLE.DOMAIN, which the side that dials checks instead of the
address, since addresses change; and as the URI spiffe://DOMAIN/ROLE, which the side that serves reads to decide what
its peer may call. Source: SPIFFE X.509-SVID, section 2.
"""

from __future__ import annotations

import enum
import logging
import ssl
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from shared.file_state import FileState, file_state

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


@dataclass(frozen=True, slots=True)
class _Pair:
    """The files' contents, checked."""

    certificate: bytes
    key: bytes
    authority: bytes
    expires_at: datetime


class Certificates:
    """A service's certificate, key and authority: those of the last files that fit together.

    Certificates are renewed by replacing the files. The next handshake reads them; open connections stay. Files that do
    not fit, as in the middle of a replacement, are logged once and tried again when they change.
    """

    def __init__(self, files: TlsFiles, role: Role) -> None:
        """Read the files.

        Raises:
            TlsError: they cannot be read, do not fit together, have expired, or do not name `role`; or the
                authority does not cover the certificate.
        """
        self._files = files
        self._role = role
        self._state = self._stat()
        self._pair = _read(files, role)
        self._num_failed_reads = 0
        # gRPC's threads read too.
        self._lock = threading.Lock()

    @property
    def expires_at(self) -> datetime:
        """When the certificate in use ceases to be valid."""
        return self._current().expires_at

    @property
    def num_failed_reads(self) -> int:
        """How often changed files did not fit."""
        self._current()
        return self._num_failed_reads

    def server_credentials(self, *, is_mutual: bool) -> grpc.ServerCredentials:
        """For a server; `is_mutual` demands a certificate from every client."""
        used = self._current()

        def renew() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC at every handshake, on its threads, one at a time."""
            nonlocal used
            if (newest := self._current()) is used:
                return None
            used = newest
            time.sleep(_RENEWAL_S)
            return _configuration(newest)

        return grpc.dynamic_ssl_server_credentials(_configuration(used), renew, require_client_authentication=is_mutual)

    def make_http_context(self) -> ssl.SSLContext:
        """For an HTTP server; a handshake uses the newest files that fit together."""
        context = self._load_context()
        used = self._current()

        def choose(handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            nonlocal context, used
            if (newest := self._current()) is not used:
                context, used = self._load_context(), newest
            handshake.context = context

        first = context
        first.sni_callback = choose
        return first

    def _load_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._files.certificate, self._files.key)
        context.set_alpn_protocols(["http/1.1"])
        return context

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a new channel, which keeps them."""
        pair = self._current()
        return grpc.ssl_channel_credentials(pair.authority, pair.key, pair.certificate)

    def name_of(self, role: Role) -> str:
        """The DNS name in the certificates of `role`."""
        return _dns_name(role, self._files.trust_domain)

    def role_of(self, context: grpc.ServicerContext) -> Role | None:
        """The role in the peer's certificate; None if it has none of this trust domain."""
        uris = {uri.decode(errors="replace") for uri in context.auth_context().get("peer_uri", ())}
        return next((role for role in Role if _uri(role, self._files.trust_domain) in uris), None)

    def _current(self) -> _Pair:
        with self._lock:
            state = self._stat()
            if state != self._state:
                self._state = state
                self._read_again()
            return self._pair

    def _read_again(self) -> None:
        try:
            self._pair = _read(self._files, self._role)
        except TlsError as error:
            self._num_failed_reads += 1
            logger.warning("changed TLS files are not used", extra={"error": str(error)})
        else:
            logger.info("TLS files read again", extra={"expires_at": self._pair.expires_at.isoformat()})

    def _stat(self) -> tuple[FileState, ...]:
        paths = (self._files.certificate, self._files.key, self._files.authority)
        return tuple(map(file_state, paths))


def _configuration(pair: _Pair) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)], pair.authority)


class TrustedAuthority:
    """What a client without a certificate knows: who signs the certificates of servers."""

    def __init__(self, path: Path, trust_domain: str | None) -> None:
        """Read the authority's certificates.

        Args:
            path: In PEM.
            trust_domain: The domain in the servers' names; None means that a server's certificate names its address.

        Raises:
            TlsError: the file cannot be read or has no certificate.
        """
        self._pem = _read_file("--tls-ca", path)
        _certificates("--tls-ca", path, self._pem)
        self._trust_domain = trust_domain

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a new channel."""
        return grpc.ssl_channel_credentials(self._pem)

    def name_of(self, role: Role) -> str | None:
        """The DNS name in the certificates of `role`; None if it is the server's address."""
        return None if self._trust_domain is None else _dns_name(role, self._trust_domain)


def _read(files: TlsFiles, role: Role) -> _Pair:
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
    try:
        private = serialization.load_pem_private_key(key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise TlsError(f"--tls-key {files.key}: not an unencrypted private key in PEM") from error
    if private.public_key() != own.public_key():
        raise TlsError(f"--tls-key {files.key} is not the key of --tls-cert {files.certificate}")
    _check_names(own, files, role)
    if own.not_valid_after_utc <= datetime.now(UTC):
        raise TlsError(f"--tls-cert {files.certificate} expired at {own.not_valid_after_utc.isoformat()}")
    if not _is_covered(own, intermediate, trusted):
        raise TlsError(
            f"--tls-ca {files.authority} does not cover --tls-cert {files.certificate}, "
            f"whose issuer is {own.issuer.rfc4514_string()}"
        )
    return _Pair(certificate, key, authority, own.not_valid_after_utc)


def _read_file(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{name} {path}: {error.strerror}") from error


def _certificates(name: str, path: Path, data: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise TlsError(f"{name} {path}: no certificate in PEM") from error


def _is_covered(own: x509.Certificate, intermediate: list[x509.Certificate], trusted: list[x509.Certificate]) -> bool:
    """Whether signatures lead from `own`, by way of `intermediate`, to one of `trusted`."""
    # Not `x509.verification`: it refuses keys and extensions that gRPC accepts.
    reached = [own]
    for certificate in reached:
        if certificate in trusted or any(_has_signed(issuer, certificate) for issuer in trusted):
            return True
        reached += [issuer for issuer in intermediate if issuer not in reached and _has_signed(issuer, certificate)]
    return False


def _has_signed(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _check_names(certificate: x509.Certificate, files: TlsFiles, role: Role) -> None:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    dns_name, uri = _dns_name(role, files.trust_domain), _uri(role, files.trust_domain)
    if dns_name not in names.get_values_for_type(x509.DNSName):
        raise TlsError(f"--tls-cert {files.certificate} lacks the DNS name {dns_name}")
    if uri not in names.get_values_for_type(x509.UniformResourceIdentifier):
        raise TlsError(f"--tls-cert {files.certificate} lacks the URI {uri}")


def _dns_name(role: Role, trust_domain: str) -> str:
    return f"{role.value}.{trust_domain}"


def _uri(role: Role, trust_domain: str) -> str:
    return f"spiffe://{trust_domain}/{role.value}"
