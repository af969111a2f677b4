"""Builds the kernels with the machine's compiler, once for each content, compiler and set of instructions.

An image brings them built, for every processor: there a worker has neither a compiler nor a minute to wait for one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from services.worker.ops.native.isa import Isa, available_isas, every_compiler_flags
from shared.process.cores import num_usable_cores
from shared.process.owned_directory import owned_directory
from shared.process.parent import leave_end_to_parent

_SOURCES = Path(__file__).parent / "kernels"
# What an image brings. It is a part of the code, and is trusted as such.
_PREBUILT = Path(__file__).parent / "prebuilt"
_COMPILERS = ("g++", "clang++")
_WORK_PREFIX = "building-"
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wextra")


class BuildError(Exception):
    """The kernels cannot be built here; the message says why."""


def build(isa: Isa, extra_flags: tuple[str, ...] = ()) -> Path:
    """The library for `isa`: an image's own, from the cache, or compiled now, which takes up to a minute.

    Args:
        extra_flags: For the compiler, after its usual ones.

    Raises:
        BuildError: there is no compiler, it fails, or the cache's folder is not the user's own.
    """
    flags = (*_FLAGS, *isa.compiler_flags, *extra_flags)
    prebuilt = next(_PREBUILT.glob(f"{_content_digest(flags)}-*.so"), None)
    return prebuilt or _build_in(_cache_dir(), flags)


def prebuild() -> list[Path]:
    """The libraries for every processor, compiled into this package, where `build` finds them without a compiler.

    Raises:
        BuildError: there is no compiler, it fails, or the package cannot be written to.
    """
    folder = _prebuilt_dir()
    return [_build_in(folder, (*_FLAGS, *flags)) for flags in every_compiler_flags()]


def _build_in(folder: Path, flags: tuple[str, ...]) -> Path:
    compiler = _find_compiler()
    library = folder / f"{_content_digest(flags)}-{_compiler_digest(compiler)}.so"
    if not library.exists():
        _compile(compiler, flags, sorted(_SOURCES.glob("*.cpp")), library)
    return library


def _find_compiler() -> str:
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"there is no C++ compiler: neither {' nor '.join(_COMPILERS)}")
    return compiler


def _cache_dir() -> Path:
    """Only its user may write to it: a library from it is run."""
    try:
        path = Path.home() / ".cache" / "lockstep" / "native"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except (OSError, RuntimeError) as error:
        raise BuildError(f"no folder for compiled kernels: {error}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise BuildError(f"{path} is not the user's own: others could write to it")
    return path


def _prebuilt_dir() -> Path:
    try:
        _PREBUILT.mkdir(exist_ok=True)
    except OSError as error:
        raise BuildError(f"no folder for an image's kernels: {error}") from error
    return _PREBUILT


def _content_digest(flags: tuple[str, ...]) -> str:
    """Equal only for equal sources and flags."""
    digest = hashlib.blake2b("\0".join(flags).encode(), digest_size=16)
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _compiler_digest(compiler: str) -> str:
    """Equal only for equal compilers."""
    version = _run([compiler, "--version"])
    return hashlib.blake2b(f"{compiler}\0{version}".encode(), digest_size=16).hexdigest()


def _compile(compiler: str, flags: tuple[str, ...], sources: list[Path], library: Path) -> None:
    """Compile in parallel. The library appears whole or not at all: several workers may build it at once."""
    with owned_directory(library.parent, _WORK_PREFIX) as work_dir:
        objects = [work_dir / f"{source.stem}.o" for source in sources]

        def compile_one(source: Path, target: Path) -> None:
            _run([compiler, *flags, "-c", str(source), "-o", str(target)], work_dir)

        with ThreadPoolExecutor(max_workers=num_usable_cores()) as pool:
            list(pool.map(compile_one, sources, objects))
        linked = work_dir / library.name
        _run([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(linked)], work_dir)
        linked.rename(library)


def _run(command: list[str], temp_dir: Path | None = None) -> str:
    """Returns what the compiler writes; its temporary files are in `temp_dir`, or where the environment says."""
    environment = dict(os.environ) if temp_dir is None else {**os.environ, "TMPDIR": str(temp_dir)}
    try:
        with leave_end_to_parent():
            return subprocess.run(
                command, check=True, capture_output=True, encoding="utf-8", errors="replace", env=environment
            ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        output = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise BuildError(f"{command[0]} failed: {output[-2000:]}") from error


def main(arguments: list[str]) -> None:
    """Build ahead for this machine, so that the first start of a worker does not wait; with --prebuild for an image."""
    isas = available_isas()
    try:
        libraries = prebuild() if arguments == ["--prebuild"] else [build(isa) for isa in isas[-1:]]
    except BuildError as error:
        sys.exit(f"the kernels were not built: {error}")
    print(*([str(path) for path in libraries] or ["no kernels for this processor"]), sep="\n")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
