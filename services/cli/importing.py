"""How the command imports models: another program does, which takes the process over.

It needs torch, which this process must not load. Whatever ends it leaves no child running.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from services.cli.processes.preflight import RefusedError, check_packages
from shared.model_files.gguf_names import SUFFIX
from shared.model_files.imported_models import find_import

_FOLDER = "lockstep-imports"


def become_importer(argv: Sequence[str]) -> NoReturn:
    """Go on as the importer, with these arguments."""
    # Progress bars of libraries are off because they do not end in a newline. An interrupt waits until the importer
    # handles it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    command = [sys.executable, "-m", "services.worker.weights.importer", *argv]
    os.execve(sys.executable, command, {"TQDM_DISABLE": "1", **os.environ})  # noqa: S606 - no shell is wanted


def is_gguf(model: Path) -> bool:
    """Whether an argument for a model is a GGUF file, whether or not there is one."""
    return model.suffix == SUFFIX and not model.is_dir()


def imported_directory(source: Path, command: Sequence[str]) -> Path:
    """The model directory that a GGUF file was imported into.

    If there is none, or the file has changed, the process becomes the importer, and then runs `lockstep` anew with
    `command`, which finds it.

    Raises:
        RefusedError: the file, or another part of the model, is missing; or what an import needs is not installed.
    """
    # Imported here because only this needs it: it says where models are kept. The tokenizer's packages include it.
    from huggingface_hub import constants  # noqa: PLC0415

    cache = Path(constants.HF_HUB_CACHE) / _FOLDER
    try:
        directory = find_import(cache, source)
    except OSError as error:
        raise RefusedError(f"{error.filename}: {error.strerror}") from None
    if directory is None:
        check_packages(command[0], [], "import")
        become_importer([f"--cache={cache}", str(source), "--then", *command])
    return directory
