"""Certificates for tests: authorities, and what they sign."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shared.network.tls import Role, TlsFiles

DOMAIN = "cell.test"
_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """Signs certificates."""

    def __init__(self, name: str = "test authority", issuer: Authority | None = None) -> None:
        """Make an authority that `issuer` has signed, or itself if None."""
        issuer = issuer or self
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.now(UTC)
        builder = _builder(self._name, issuer._name, self._key.public_key(), now + _DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.pem = builder.sign(issuer._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        *,
        dns: Sequence[str] = (),
        uris: Sequence[str] = (),
        expires_at: datetime | None = None,
    ) -> Issued:
        """A certificate with these names; by default it is valid for a day."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
        expires_at = expires_at or datetime.now(UTC) + _DAY
        builder = _builder(subject, self._name, key.public_key(), expires_at)
        names = [*map(x509.DNSName, dns), *map(x509.UniformResourceIdentifier, uris)]
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Issued(certificate.public_bytes(serialization.Encoding.PEM), private)

    def issue_role(self, role: Role, *, expires_at: datetime | None = None) -> Issued:
        """A certificate that names a role of `DOMAIN`."""
        return self.issue(
            dns=[f"{role.value}.{DOMAIN}"], uris=[f"spiffe://{DOMAIN}/{role.value}"], expires_at=expires_at
        )


def write_files(folder: Path, issued: Issued, *authorities: Authority) -> TlsFiles:
    """Write what a service that trusts these authorities is given; existing files are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    files = TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt", DOMAIN)
    trusted = b"".join(authority.pem for authority in authorities)
    path_to_data = {files.certificate: issued.certificate, files.key: issued.key, files.authority: trusted}
    for path, data in path_to_data.items():
        new = path.with_suffix(".new")
        new.write_bytes(data)
        new.rename(path)
    return files


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, expires_at: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(datetime.now(UTC), expires_at) - _DAY)
        .not_valid_after(expires_at)
    )
