"""The key that a client's command sends: from a file or the environment, since other users can read a command line."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from services.cli.api_key import API_KEY_VARIABLE
from shared.tenants.client_keys import ClientKeysError, read_key_file

Metadata = tuple[tuple[str, str], ...]


class KeyRefusedError(Exception):
    """The server needs a key, or another one; the message says how to give it."""


def add_key_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag for servers whose clients have keys."""
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="send the key in this file, its only line")


def metadata_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Metadata:
    """What each call sends beside its message. Ends the process if the file has no key."""
    if args.key_file is None:
        key = os.environ.get(API_KEY_VARIABLE)
        return metadata_of_key(key) if key else ()
    try:
        return metadata_of_key(read_key_file(args.key_file))
    except ClientKeysError as error:
        parser.error(f"--key-file {error}")


def metadata_of_key(key: str) -> Metadata:
    """What each call with a key sends beside its message."""
    return (("authorization", f"Bearer {key}"),)


@contextlib.asynccontextmanager
async def explain_refused_key(target: str, metadata: Metadata) -> AsyncIterator[None]:
    """Explain a call to `target` that failed for its key, or for want of one.

    Raises:
        KeyRefusedError: it did.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            raise
        if metadata:
            raise KeyRefusedError(
                f"{target} does not know the key in --key-file or {API_KEY_VARIABLE}: ask its operator for another one"
            ) from None
        raise KeyRefusedError(
            f"{target} needs a key: ask its operator for one, and give the file that has it as --key-file, or the key "
            f"itself in {API_KEY_VARIABLE}"
        ) from None
