"""The images of three roles, built by buildah from the Dockerfile as it is, and one from scratch for pods' pauses.

The base is Debian's, by debootstrap. Base, layers and archives are kept in `.cache/cluster-images`. Packages come from
the index of this machine, which `pip.conf` and the file of trusted authorities name, and torch by `TORCH_ARGS`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from tests.support.deploy.dockerfile import DOCKERFILE
from tests.support.kubernetes.control_plane import missing_binaries
from tests.support.kubernetes.node import PAUSE, snapshotter
from tests.support.system.processes import ROOT

REGISTRY, TAG = "localhost", "one"
_TARGETS = ("tokenizer", "scheduler", "worker-cpu")
_CACHE = ROOT / ".cache" / "cluster-images"
_BASE = f"{REGISTRY}/base"
_RELEASE = "bookworm"
_PACKAGES = "python3,python3-pip,python3-venv,python-is-python3,ca-certificates"
_OF_THIS_MACHINE = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")


def why_no_images() -> str:
    """Why none can be built here; empty if they can."""
    missing = missing_binaries("buildah", "debootstrap", "gcc")
    without = "" if os.environ.get("TORCH_ARGS") else "no TORCH_ARGS, which say where torch for CPUs is"
    return "; ".join(filter(None, [missing, without]))


def build_images() -> list[Path]:
    """Build what has changed; returns the archives of all."""
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        base = _build_base(Path(folder))
        return [_build_pause(Path(folder)), *(_build_role(target, base) for target in _TARGETS)]


def _build_base(folder: Path) -> str:
    """Make the base if there is none; returns its name with its digest."""
    archive, root = _CACHE / "base.tar", folder / "root"
    if not archive.exists():
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _RELEASE, root], check=True)
        # As in Python's images, pip may change what it has installed. Devices are those of a container.
        for path in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            path.unlink()
        new = archive.with_suffix(".new")
        subprocess.run(
            ["tar", f"--directory={root}", "--exclude=./dev/*", "--create", f"--file={new}", "."], check=True
        )
        new.rename(archive)
    _build(_BASE, _CACHE, "FROM scratch\nADD base.tar /\n")
    return f"{_BASE}@{_buildah('inspect', '--type=image', '--format={{.FromImageDigest}}', _BASE).strip()}"


def _build_pause(folder: Path) -> Path:
    source = "#include <unistd.h>\nint main(void) { for (;;) pause(); }\n"
    compile_it = ["gcc", "-xc", "-", "-static", "-o", str(folder / "pause")]
    subprocess.run(compile_it, input=source.encode(), check=True)
    _build(PAUSE, folder, 'FROM scratch\nCOPY pause /pause\nENTRYPOINT ["/pause"]\n')
    return _archive(PAUSE)


def _build_role(target: str, base: str) -> Path:
    name = f"{REGISTRY}/lockstep-{target}:{TAG}"
    arguments = {"PYTHON_BASE": base, "VERSION": "0.1.0", "REVISION": "test"}
    if target.startswith("worker"):
        arguments["TORCH_ARGS"] = os.environ["TORCH_ARGS"]
    flags = [f"--build-arg={key}={value}" for key, value in arguments.items()]
    flags += [f"--volume={path}:{path}:ro" for path in _OF_THIS_MACHINE if Path(path).exists()]
    _build(name, ROOT, DOCKERFILE.read_text(encoding="utf-8"), f"--target={target}", *flags)
    return _archive(name)


def _build(name: str, context: Path, text: str, *flags: str) -> None:
    how = ("--layers", "--isolation=chroot", "--pull=never", "--file=-", f"--tag={name}")
    _buildah("build", *how, *flags, str(context), text=text)


def _archive(name: str) -> Path:
    path = _CACHE / f"{name.replace('/', '-').replace(':', '-')}.tar"
    # An archive that is there would be refused.
    path.unlink(missing_ok=True)
    _buildah("push", name, f"docker-archive:{path}:{name}")
    return path


def _buildah(command: str, *args: str, text: str = "") -> str:
    """Run buildah, which may leave mounts and notes of them: they end with it."""
    driver = "vfs" if snapshotter(_CACHE) == "native" else "overlay"
    with tempfile.TemporaryDirectory() as notes:
        places = [f"--root={_CACHE / 'storage'}", f"--runroot={notes}", f"--storage-driver={driver}"]
        whole = ["unshare", "--mount", "buildah", *places, command, *args]
        result = subprocess.run(whole, input=text, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{shlex.join([command, *args])}\n{result.stderr}"
    return result.stdout
