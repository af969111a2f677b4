"""Packs what `tests.bench.gpu` needs on a machine that has a GPU, torch with Triton, and no network.

The pack holds the generated stubs, wheels of our requirements for that machine's Python, and on request a model, cut
into parts that fit a small transfer.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "deploy" / "constraints-cpu.txt"
# What the services import beyond torch, Triton and numpy, with what these packages need. Installed with `--no-deps`, so
# that nothing replaces the machine's torch.
REQUIREMENTS = (
    *("grpcio", "grpcio-status", "grpcio-health-checking", "grpcio-reflection", "protobuf", "googleapis-common-protos"),
    *("pydantic", "pydantic-core", "pydantic-settings", "annotated-types", "typing-inspection", "typing-extensions"),
    *("python-dotenv", "prometheus-client", "uvloop", "llguidance", "safetensors", "tokenizers"),
)
# pip matches a platform exactly.
PLATFORMS = [
    "manylinux1_x86_64",
    "manylinux2014_x86_64",
    *(f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 27, 28, 31, 34, 35, 39)),
]
PART_BYTES = 24 * 1024 * 1024


def main() -> int:
    """Fill the pack; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path, help="folder to fill; what it held is removed")
    parser.add_argument("--model", type=Path, help="model directory to include, cut into parts")
    parser.add_argument("--python", default="3.12", help="the machine's Python (default: 3.12)")
    args = parser.parse_args()
    shutil.rmtree(args.pack, ignore_errors=True)
    download_wheels(args.pack / "wheels", args.python)
    copy_stubs(args.pack / "stubs")
    if args.model is not None:
        cut_model(args.model, args.pack / "model")
    for folder in sorted(args.pack.iterdir()):
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        print(f"{folder.name:8} {len(sizes):4} files {sum(sizes) / 2**20:8.1f} MiB")
    return 0


def download_wheels(folder: Path, python: str) -> None:
    """Download the requirements' wheels in the versions of the constraints."""
    platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
    interpreter = ["--python-version", python, "--implementation", "cp", *platforms]
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, *interpreter, "-c", CONSTRAINTS, "-d", folder, *REQUIREMENTS], check=True)


def copy_stubs(folder: Path) -> None:
    """Copy the generated modules, in the folders of their protos."""
    for path in sorted((ROOT / "protos").rglob("*_pb2*.py")):
        target = folder / path.relative_to(ROOT / "protos")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def cut_model(model: Path, folder: Path) -> None:
    """Cut each file of a model directory into parts `FILE.000`, `FILE.001` and so on, which `cat` joins again."""
    folder.mkdir(parents=True)
    for path in sorted(model.iterdir()):
        with path.open("rb") as file:
            number = 0
            while (part := file.read(PART_BYTES)) or not number:
                (folder / f"{path.name}.{number:03}").write_bytes(part)
                number += 1


if __name__ == "__main__":
    sys.exit(main())
