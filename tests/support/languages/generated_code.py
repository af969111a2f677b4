"""Runs generators and compilers of other languages on the protos, as the authors of clients do."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from tests.support.system.package_tools import tool
from tests.support.system.processes import ROOT

PROTOS = ROOT / "protos"
CLIENTS = ROOT / "tests" / "integration" / "languages"

STATUS = "google/rpc/status.proto"
"""The import that is no part of protobuf. Languages whose gRPC does not bring it need it generated."""

# `STATUS` is in site-packages.
IMPORTS = (f"-I{PROTOS}", f"-I{sysconfig.get_path('purelib')}")


def proto_files() -> list[str]:
    """All files of the protocol, as they are imported."""
    return sorted(path.relative_to(PROTOS).as_posix() for path in PROTOS.rglob("*.proto"))


def generate(*options: str | Path) -> None:
    """Run protoc on all protos."""
    run(tool("protoc") / "bin" / "protoc", *IMPORTS, *options, *proto_files())


def run(*command: str | Path, directory: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
    """Run a command to its end.

    Raises:
        AssertionError: it failed; the message is what it printed.
    """
    result = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
