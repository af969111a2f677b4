"""Installs what `tests.bench.gpu.pack` made, on a machine without network. Needs only Python's own library."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[3]
BASE, MANIFEST = "base", "model.json"
# Names the folders where this Python has its packages.
_LINK = "machine.pth"


def run_unpacked(pack: Path, flags: Sequence[str]) -> NoReturn:
    """Install the pack, then run the benchmark anew in its environment, in place of this process.

    Args:
        pack: Parts of it may come later: the model is there once all have come, in this call or earlier ones.
        flags: The benchmark's.
    """
    home = unpacked_dir(pack)
    python = make_environment(pack, home)
    copy_stubs(pack, ROOT / "protos")
    model = join_model(pack, home)
    rest = without_pack(flags)
    if model is not None and not any(flag.partition("=")[0] == "--model" for flag in rest):
        rest += ["--model", str(model)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    os.execve(python, [str(python), "-m", "tests.bench.gpu", *rest], {**os.environ, "PYTHONPATH": paths})


def has_base(pack: Path) -> bool:
    """Whether there is something to install, or it was installed before."""
    return (pack / BASE / "wheels").is_dir() or unpacked_dir(pack).is_dir()


def unpacked_dir(pack: Path) -> Path:
    """Where the pack is installed: beside it, as a transfer may replace the pack."""
    return pack.resolve().with_name(f"{pack.resolve().name}-installed")


def make_environment(pack: Path, home: Path) -> Path:
    """An environment of the wheels and of all that this Python has; returns its interpreter."""
    environment = home / "environment"
    python = environment / "bin" / "python"
    if any(environment.glob(f"lib/python*/site-packages/{_LINK}")):
        return python
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    wheels = sorted((pack / BASE / "wheels").glob("*.whl"))
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-index", "--no-deps", "--target", str(packages)]
    subprocess.run([*command, *map(str, wheels)], check=True)
    # Read after the packages beside it, which therefore take precedence. Written last: it says that all is there.
    here = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    lines = [f"import site; site.addsitedir({path!r})" for path in here]
    (packages / _LINK).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return python


def copy_stubs(pack: Path, protos: Path) -> None:
    """Put the generated modules beside their protos, if they have come."""
    if (pack / BASE / "stubs").exists():
        shutil.copytree(pack / BASE / "stubs", protos, dirs_exist_ok=True)


def join_model(pack: Path, home: Path) -> Path | None:
    """Keep the parts that have come, and join them if all have; None if some are missing.

    Raises:
        ValueError: a joined file differs from the one that was cut.
    """
    model, parts, manifest = home / "model", home / "parts", home / MANIFEST
    if (model / "config.json").exists():
        return model
    parts.mkdir(parents=True, exist_ok=True)
    if (pack / BASE / MANIFEST).exists():
        shutil.copy(pack / BASE / MANIFEST, manifest)
    for part in pack.glob("model-*/*"):
        shutil.copy(part, parts / part.name)
    if not manifest.exists():
        return None
    files: dict[str, dict[str, object]] = json.loads(manifest.read_text(encoding="utf-8"))
    names = {name: [parts / part for part in part_names(name, int(str(file["parts"])))] for name, file in files.items()}
    if not all(part.exists() for paths in names.values() for part in paths):
        return None
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir()
    # The file that says that the model is there comes last.
    for name in sorted(files, key=lambda name: name == "config.json"):
        _join(names[name], model / name, str(files[name]["sha256"]))
    return model


def part_names(name: str, count: int) -> list[str]:
    """What a file's parts are called."""
    return [f"{name}.{number:03}" for number in range(count)]


def without_pack(flags: Sequence[str]) -> list[str]:
    """The flags but `--pack DIR` or `--pack=DIR`."""
    rest: list[str] = []
    is_value = False
    for flag in flags:
        if not is_value and flag != "--pack" and not flag.startswith("--pack="):
            rest.append(flag)
        is_value = flag == "--pack"
    return rest


def _join(parts: Sequence[Path], target: Path, sha256: str) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for part in parts:
            content = part.read_bytes()
            digest.update(content)
            file.write(content)
    if digest.hexdigest() != sha256:
        raise ValueError(f"{target.name} differs from the file that was cut")
