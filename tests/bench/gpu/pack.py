"""Packs what `tests.bench.gpu` needs on a machine that has a GPU, torch with Triton, transformers, and no network.

    base       the generated stubs, wheels of our requirements for that machine's Python, and what the model consists of
    model-0 …  the model, cut into parts; each folder fits a transfer of 64 MiB with the repository beside it

`tests.bench.gpu --pack` installs it. Needs only Python's own library and pip.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tests.bench.gpu.unpack import BASE, MANIFEST, ROOT, part_names

# What the services import beyond torch, Triton, numpy, xxhash and transformers, with what these packages need.
# Installed with `--no-deps`, so that nothing replaces the machine's torch.
REQUIREMENTS = (
    *("grpcio", "grpcio-status", "grpcio-health-checking", "grpcio-reflection", "protobuf", "googleapis-common-protos"),
    *("pydantic", "pydantic-core", "pydantic-settings", "annotated-types", "typing-inspection", "typing-extensions"),
    *("python-dotenv", "prometheus-client", "uvloop", "llguidance", "safetensors", "tokenizers"),
    *("cryptography", "cffi", "pycparser"),
    *("aiohttp", "aiohappyeyeballs", "aiosignal", "attrs", "frozenlist", "multidict", "propcache", "yarl", "idna"),
    "msgspec",
    # For the tests' own modules.
    *("psutil", "hypothesis", "sortedcontainers"),
)
# pip matches a platform exactly.
PLATFORMS = [
    "manylinux1_x86_64",
    "manylinux2014_x86_64",
    *(f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 27, 28, 31, 34, 35, 39)),
]
PART_BYTES = 24 * 1024 * 1024
PARTS_PER_FOLDER = 2


def main() -> int:
    """Fill the pack; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path, help="folder to fill; what it held is removed")
    parser.add_argument("--model", type=Path, help="model directory to include, cut into parts")
    parser.add_argument("--add", nargs="+", default=[], help="more packages, such as a yardstick or transformers==X")
    parser.add_argument("--python", default="3.12", help="the machine's Python (default: 3.12)")
    args = parser.parse_args()
    shutil.rmtree(args.pack, ignore_errors=True)
    download_wheels(args.pack / BASE / "wheels", args.python, args.add)
    copy_stubs(args.pack / BASE / "stubs")
    if args.model is not None:
        cut_model(args.model, args.pack)
    for folder in sorted(args.pack.iterdir()):
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        print(f"{folder.name:8} {len(sizes):4} files {sum(sizes) / 2**20:8.1f} MiB")
    return 0


def download_wheels(folder: Path, python: str, more: Sequence[str]) -> None:
    """Download the requirements' wheels in the versions that are installed here, which fit one another."""
    platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
    interpreter = ["--python-version", python, "--implementation", "cp", *platforms]
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:"]
    pinned = [f"{name}=={version(name)}" for name in REQUIREMENTS]
    subprocess.run([*command, *interpreter, "-d", str(folder), *pinned, *more], check=True)


def copy_stubs(folder: Path) -> None:
    """Copy the generated modules, in the folders of their protos."""
    for path in sorted((ROOT / "protos").rglob("*_pb2*.py")):
        target = folder / path.relative_to(ROOT / "protos")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def cut_model(model: Path, pack: Path, part_bytes: int = PART_BYTES) -> None:
    """Cut each file of a model directory into parts, a few in each folder, and list the files."""
    files: dict[str, dict[str, object]] = {}
    num_before = 0
    for path in sorted(model.iterdir()):
        content = path.read_bytes()
        parts = [content[start : start + part_bytes] for start in range(0, max(len(content), 1), part_bytes)]
        for name, part in zip(part_names(path.name, len(parts)), parts, strict=True):
            folder = pack / f"model-{num_before // PARTS_PER_FOLDER}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(part)
            # Small files go along with the part before them.
            num_before += len(part) == part_bytes
        files[path.name] = {"parts": len(parts), "sha256": hashlib.sha256(content).hexdigest()}
    (pack / BASE).mkdir(parents=True, exist_ok=True)
    (pack / BASE / MANIFEST).write_text(json.dumps(files, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
