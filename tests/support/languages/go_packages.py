"""gRPC for Go and its generators: `python -m tests.support.languages.go_packages`.

They are sources in Debian's packages, of which each release has versions that fit each other. apt finds, downloads and
checks them in folders of its own; nothing is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.system.package_tools import TOOLS, replace, tool

GO_PACKAGES = TOOLS / "go-packages"

_PACKAGES = ("golang-google-grpc-dev", "golang-google-protobuf-dev")
_GENERATORS = ("google.golang.org/protobuf/cmd/protoc-gen-go", "google.golang.org/grpc/cmd/protoc-gen-go-grpc")


def go_environment(*folders: Path) -> dict[str, str]:
    """For commands of Go, whose packages are in the `src` of these folders and nowhere else."""
    return {
        "CGO_ENABLED": "0",
        "GO111MODULE": "off",
        # Compiled packages; without their paths, so that a folder may move.
        "GOCACHE": str(TOOLS / "go-build"),
        "GOFLAGS": "-trimpath",
        "GOENV": "off",
        "GOPATH": ":".join(map(str, folders)),
        "GOROOT": str(tool("go")),
        "GOTOOLCHAIN": "local",
    }


def bring_go_packages() -> None:
    """Make `GO_PACKAGES`, the whole of it or nothing: `src` has the packages, `bin` the generators.

    Raises:
        CalledProcessError: a package cannot be had, or does not compile.
    """
    with tempfile.TemporaryDirectory(dir=TOOLS) as temporary:
        unpacked, content = Path(temporary) / "unpacked", Path(temporary) / "content"
        for package in _download(Path(temporary) / "apt"):
            subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True)
        content.mkdir()
        (unpacked / "usr" / "share" / "gocode" / "src").rename(content / "src")
        go = (tool("go") / "bin" / "go", "build")
        environment = go_environment(content)
        for generator in _GENERATORS:
            output = ("-o", content / "bin" / Path(generator).name)
            subprocess.run([*go, *output, generator], env=environment, check=True)
        # Compiled now, so that tests find it in the cache.
        subprocess.run([*go, "google.golang.org/grpc"], env=environment, check=True)
        replace(content, GO_PACKAGES)


def _download(folder: Path) -> list[Path]:
    """Let apt download the packages and all that they need, as if none was installed."""
    for name in ("state/lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    settings = {
        "APT::Sandbox::User": "root",
        "Debug::NoLocking": "1",
        "Dir::Cache": folder / "cache",
        "Dir::State": folder / "state",
        "Dir::State::status": folder / "status",
    }
    apt_get = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    subprocess.run([*apt_get, "update"], check=True)
    download = ("install", "--download-only", "--no-install-recommends")
    subprocess.run([*apt_get, *download, *_PACKAGES], stdout=subprocess.DEVNULL, check=True)
    return sorted((folder / "cache" / "archives").glob("*.deb"))


if __name__ == "__main__":
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        sys.exit("gRPC for Go is in Debian's packages, and this is another system")
    bring_go_packages()
