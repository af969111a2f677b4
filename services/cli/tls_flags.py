"""The flags of the commands' TLS."""

from __future__ import annotations

import argparse
from pathlib import Path

from shared.network.rpc import Peer
from shared.network.tls import Certificates, Role, TlsError, TlsFiles, TrustedAuthority


def add_trust_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a client, which has no role."""
    group = parser.add_argument_group("TLS")
    group.add_argument(
        "--tls-ca", type=Path, metavar="FILE", help="use TLS, and trust servers that these certificates have signed"
    )
    group.add_argument(
        "--trust-domain",
        metavar="DOMAIN",
        help="expect the server's name for its role in DOMAIN, instead of the target's host name",
    )
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="show this certificate, if the server needs one")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="its key")


def add_certificate_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of an operator, whose certificate names the role."""
    group = parser.add_argument_group("TLS, with all of these")
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="the operator's certificate")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="its key")
    group.add_argument("--tls-ca", type=Path, metavar="FILE", help="certificates that have signed the server's")
    group.add_argument("--trust-domain", metavar="DOMAIN", help="the domain in the names of all roles")


def peer_of_client(parser: argparse.ArgumentParser, args: argparse.Namespace, role: Role) -> Peer | None:
    """The server of a client; None without TLS. Ends the process if the flags cannot be used."""
    if (args.tls_cert is None) != (args.tls_key is None):
        parser.error("--tls-cert and --tls-key must be used together")
    if args.tls_ca is None:
        for flag, value in (("--trust-domain", args.trust_domain), ("--tls-cert", args.tls_cert)):
            if value is not None:
                parser.error(f"{flag} needs --tls-ca")
        return None
    try:
        own = TrustedAuthority(args.tls_ca, args.trust_domain, certificate=args.tls_cert, key=args.tls_key)
        return Peer(own, role)
    except TlsError as error:
        parser.error(str(error))


def peer_of_operator(parser: argparse.ArgumentParser, args: argparse.Namespace, role: Role) -> Peer | None:
    """The server of an operator; None without TLS. Ends the process if the flags cannot be used."""
    values = (args.tls_cert, args.tls_key, args.tls_ca, args.trust_domain)
    if all(value is None for value in values):
        return None
    if any(value is None for value in values):
        parser.error("--tls-cert, --tls-key, --tls-ca and --trust-domain must be used together")
    try:
        return Peer(Certificates(TlsFiles(*values), Role.OPERATOR), role)
    except TlsError as error:
        parser.error(str(error))
