"""A fixed English text in the public domain: two test files of the Brotli project, from its source package.

"Alice's Adventures in Wonderland" and "As You Like It", as in the Canterbury corpus.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile

from tests.support.system.processes import ROOT

_VERSION = "1.1.0"
_PACKAGE = ROOT / ".cache" / f"Brotli-{_VERSION}.tar.gz"
_SHA256 = "81de08ac11bcb85841e440c13611c00b67d3bf82698314928d0b676362546724"
_FILES = ("alice29.txt", "asyoulik.txt")


def public_text() -> str:
    """The text; the first call downloads 7 MB into .cache/.

    Raises:
        RuntimeError: The package is not the expected one.
    """
    if not _PACKAGE.exists():
        print("downloading the text (7 MB)", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--no-binary=brotli"]
        subprocess.run([*command, f"--dest={_PACKAGE.parent}", f"brotli=={_VERSION}"], check=True)
    if hashlib.sha256(_PACKAGE.read_bytes()).hexdigest() != _SHA256:
        raise RuntimeError(f"{_PACKAGE} is not the package whose text was chosen")
    with tarfile.open(_PACKAGE) as archive:
        return "\n".join(_read(archive, name) for name in _FILES)


def _read(archive: tarfile.TarFile, name: str) -> str:
    member = archive.extractfile(f"Brotli-{_VERSION}/tests/testdata/{name}")
    assert member is not None
    return member.read().decode("ascii").replace("\r\n", "\n")
