"""Downloads a model's files and checks their SHA-256, or waits until another pod has done so.

The chart's job runs it, and its pods as they start.

Plain Python, since it runs from a ConfigMap, in whatever image has Python 3.11. A file gets its name only once its hash
is right, and the directory is complete once it has the manifest's mark, which is written last.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import sys
import time
import urllib.request
from pathlib import Path

_CHUNK_BYTES = 1 << 20
_POLL_S = 2.0
_TIMEOUT_S = 60.0


class WrongContentError(Exception):
    """A downloaded file is not the one that the manifest names."""


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--manifest", type=Path, required=True, help="JSON with url and sha256, by file name")
    parser.add_argument("--directory", type=Path, required=True, help="where the files belong")
    parser.add_argument("--wait", action="store_true", help="only wait until they are there")
    args = parser.parse_args()
    mark = args.directory / f".complete-{hash_file(args.manifest)}"
    if args.wait:
        return wait_for(mark)
    manifest = json.loads(args.manifest.read_text(encoding="utf-8"))
    try:
        for name, sha256 in sorted(manifest["sha256"].items()):
            fetch(f"{manifest['url'].rstrip('/')}/{name}", args.directory / name, sha256)
    except (OSError, http.client.HTTPException, WrongContentError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    mark.touch()
    return 0


def wait_for(mark: Path) -> int:
    """Return once the file exists; the pod's own deadlines bound the wait."""
    while not mark.exists():
        time.sleep(_POLL_S)
    return 0


def fetch(url: str, path: Path, sha256: str) -> None:
    """Make `path` the file with this hash, unless it is already; on failure there is no file of that name.

    Raises:
        OSError: it cannot be read or written.
        WrongContentError: it has another hash.
    """
    if path.exists():
        if hash_file(path) == sha256:
            return
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    # The chart's schema takes https alone.
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response, part.open("wb") as output:  # noqa: S310
        while chunk := response.read(_CHUNK_BYTES):
            output.write(chunk)
    digest = hash_file(part)
    if digest != sha256:
        part.unlink()
        raise WrongContentError(f"{url}: its SHA-256 is {digest}, not {sha256}")
    part.replace(path)


def hash_file(path: Path) -> str:
    """The file's SHA-256, in hexadecimal."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


if __name__ == "__main__":
    raise SystemExit(main())
