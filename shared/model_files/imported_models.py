"""The cache of model directories that GGUF files were imported into: by which files, found without reading them.

    CACHE/DIGEST/NAME          a model directory; DIGEST is the start of its source's SHA-256
    CACHE/records/KEY.json     which one a path stands for, and what its files were like: KEY is of the path

A file counts as unchanged while its device, inode, size and time of change are the same.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.model_files.gguf_names import part_paths
from shared.model_files.model_dir import CONFIG, TOKENIZER, WEIGHTS

MANIFEST = "manifest.json"
"""Names the source of an imported directory, and the digests of its files."""
IMPORT_VERSION = 5
"""The version of what an import makes of a file. What an older one made is not used."""
_RECORDS = "records"
_NEEDED = (MANIFEST, CONFIG, TOKENIZER, WEIGHTS)
# The digits of a digest: enough for no two models to meet.
_NAME_DIGITS = 16

FileIdentity = list[Any]


def identify(source: Path) -> list[FileIdentity]:
    """What the files of a model are like: their paths, devices, inodes, sizes and times of change.

    Raises:
        OSError: one of them is missing.
    """
    stats = [(path.resolve(), path.stat()) for path in part_paths(source)]
    return [[str(path), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def import_directory(cache: Path, source_sha256: str, name: str) -> Path:
    """Where the import of a source belongs."""
    return cache / source_sha256[:_NAME_DIGITS] / name


def find_import(cache: Path, source: Path) -> Path | None:
    """The directory that a file was imported into; None if there is none, or the file has changed since.

    Raises:
        OSError: the file, or another of its parts, is missing.
    """
    identity = identify(source)
    try:
        record = json.loads(_record_path(cache, source).read_bytes())
        if record["version"] != IMPORT_VERSION or record["files"] != identity:
            return None
        directory = Path(record["directory"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return directory if all((directory / name).is_file() for name in _NEEDED) else None


def record_import(cache: Path, source: Path, files: Sequence[FileIdentity], directory: Path) -> None:
    """Remember that `source`, with these identities, was imported into `directory`.

    Raises:
        OSError: the record cannot be written.
    """
    path = _record_path(cache, source)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"version": IMPORT_VERSION, "files": list(files), "directory": str(directory)}
    part = path.with_suffix(f".{secrets.token_hex(8)}.part")
    part.write_text(json.dumps(record) + "\n", encoding="utf-8")
    part.replace(path)


def _record_path(cache: Path, source: Path) -> Path:
    key = hashlib.sha256(str(source.resolve()).encode(errors="surrogateescape")).hexdigest()
    return cache / _RECORDS / f"{key[:_NAME_DIGITS]}.json"
