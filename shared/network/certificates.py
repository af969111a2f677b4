"""What certificates say, and whose signature they have.

Only processes with TLS import this: the library takes as long to import as gRPC.
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.x509 import Certificate


def read_certificates(data: bytes) -> list[Certificate]:
    """The certificates of a file, at least one. Raises ValueError: there is none in PEM."""
    return x509.load_pem_x509_certificates(data)


def pem_of(certificate: Certificate) -> bytes:
    """A certificate alone, in PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def is_key_of(key: bytes, certificate: Certificate) -> bool:
    """Whether a private key belongs to a certificate. Raises ValueError: it is no unencrypted one in PEM."""
    try:
        private = serialization.load_pem_private_key(key, password=None)
    except (TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(str(error)) from error
    return private.public_key() == certificate.public_key()


def is_covered(own: Certificate, intermediate: Sequence[Certificate], trusted: Sequence[Certificate]) -> bool:
    """Whether signatures lead from `own`, by way of `intermediate`, to one of `trusted`."""
    # Not `x509.verification`: it refuses keys and extensions that gRPC accepts.
    reached = [own]
    for certificate in reached:
        if certificate in trusted or any(_has_signed(issuer, certificate) for issuer in trusted):
            return True
        reached += [issuer for issuer in intermediate if issuer not in reached and _has_signed(issuer, certificate)]
    return False


def names_in(certificate: Certificate) -> tuple[list[str], list[str]]:
    """The DNS names and the URIs that a certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    return names.get_values_for_type(x509.DNSName), names.get_values_for_type(x509.UniformResourceIdentifier)


def _has_signed(issuer: Certificate, certificate: Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True
