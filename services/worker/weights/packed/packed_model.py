"""The file of one rank's packed weights: read whole and checked before use, or written while the weights load.

Its data is copied into this process's own memory in huge pages, by all threads: decoding from a mapped file's small
pages is slower, and a mapped file that is truncated ends its readers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.worker.huge_memory import huge_memory
from services.worker.ops import Ops
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.prepared import Packing
from services.worker.parallel.communicator import Communicator, Parallel
from services.worker.weights.packed.recording import Recorder
from services.worker.weights.packed.replay import KeptMemory
from services.worker.weights.packed.sources import code_digest, file_states, identify_sources
from shared.model_files.model_dir import (
    CONFIG,
    HF_QUANT_CONFIG,
    QUANT_CONFIG,
    QUANTIZE_CONFIG,
    WEIGHTS_INDEX,
    weight_paths,
)
from shared.model_files.packed_files import (
    CHUNK_BYTES,
    PackedCache,
    PackedDirectory,
    PackedFileError,
    default_packed_dir,
    file_name,
    read_header,
)

logger = logging.getLogger(__name__)

# Changes whenever files would be read another way.
_FORMAT = 1
_CONFIGS = (CONFIG, HF_QUANT_CONFIG, QUANTIZE_CONFIG, QUANT_CONFIG, WEIGHTS_INDEX)
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class Wanted:
    """What weights are packed for, beside the model's directory."""

    dtype: torch.dtype
    quantization: MatrixFormat | None
    with_mtp: bool
    parallel: Parallel
    code: str = ""
    """See `CausalLM`: what reads them, and in which order."""
    task: str = "generate"
    """What the model is served for."""


class PackedModel:
    """The file of one rank's part of a model, whether there is one or not. A context manager."""

    def __init__(self, cache: PackedCache, model_dir: Path, packing: Packing, wanted: Wanted, num_threads: int) -> None:
        """Find out which file it is.

        Raises:
            OSError: the cache's folder, or a file of the model, cannot be read.
            ModelDirectoryError: the model's directory has no weights.
        """
        self._max_bytes = cache.max_bytes
        self._num_threads = min(num_threads, _MAX_THREADS)
        self._paths = [
            *weight_paths(model_dir),
            *(model_dir / each for each in _CONFIGS if (model_dir / each).exists()),
        ]
        self._states = file_states(self._paths)
        self._labels = {
            "model_dir": str(model_dir.resolve()),
            "form": packing.form,
            "quantization": "none" if wanted.quantization is None else wanted.quantization.value,
            "tp": f"{wanted.parallel.tp.rank}/{wanted.parallel.tp.size}",
            "code": wanted.code or "lockstep",
            "task": wanted.task,
            "ep": "none" if wanted.parallel.ep is None else f"{wanted.parallel.ep.rank}/{wanted.parallel.ep.size}",
        }
        parts = (
            [str(_FORMAT), torch.__version__, code_digest(), str(wanted.dtype), str(wanted.with_mtp)],
            [each.name for each in self._paths],
            identify_sources(self._paths, self._num_threads),
            list(self._labels.values())[1:],
        )
        self._recipe = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        self._directory = PackedDirectory(cache.directory or default_packed_dir())

    def __enter__(self) -> PackedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self._directory.close()

    @property
    def name(self) -> str:
        """The file's."""
        return file_name(self._recipe)

    def read(self, on_progress: Callable[[float], None]) -> KeptMemory | None:
        """Read and check the file; None if there is none, or if it was damaged, and then it is removed.

        Args:
            on_progress: Called with the part read, 0 to 1; raising in it ends the reading.
        """
        try:
            fd = self._directory.open(self.name)
            try:
                kept = _read_whole(fd, self._recipe, self._num_threads, on_progress)
                with suppress(OSError):
                    os.utime(fd)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return None
        except (OSError, PackedFileError) as error:
            self.discard(error)
            return None
        logger.info("packed weights are read from a file", extra={"file": self.name, "bytes": kept.num_bytes})
        return kept

    def record(self) -> Recorder | None:
        """Begin a new file; None if there can be none, which the log says."""
        try:
            return Recorder(self._directory.create(self._max_bytes))
        except OSError as error:
            _say_not_kept(error)
            return None

    def publish(self, recorder: Recorder, facts: Mapping[str, Any]) -> None:
        """End the file, unless it could not be written or the model's files have changed meanwhile. The log says which.

        Args:
            facts: What `KeptMemory.facts` are to be.
        """
        try:
            if file_states(self._paths) != self._states:
                raise OSError("the model's files have changed")
            num_bytes = recorder.publish(self._recipe, {"labels": self._labels, "facts": facts})
            removed = self._directory.trim(self._max_bytes)
        except OSError as error:
            _say_not_kept(error)
            return
        extra = {"file": self.name, "bytes": num_bytes, "removed": [each.name for each in removed]}
        logger.info("packed weights are kept in a file", extra=extra)

    def discard(self, error: Exception) -> None:
        """Remove the file, which `error` says something is wrong with."""
        logger.warning(
            "a file of packed weights is removed: the next load packs anew",
            extra={"file": self.name, "error": str(error)},
        )
        with suppress(OSError):
            self._directory.remove(self.name)


def find_packed(cache: PackedCache | None, ops: Ops, model_dir: Path, wanted: Wanted) -> PackedModel | None:
    """The file of a rank's packed weights; None if there can be none, which the log says if one is wanted.

    Raises:
        ModelDirectoryError: the model's directory has no weights.
    """
    if cache is None or ops.packing is None:
        return None
    try:
        return PackedModel(cache, model_dir, ops.packing, wanted, ops.num_threads)
    except (OSError, RuntimeError) as error:
        _say_not_kept(error)
        return None


def are_kept_by_all(kept: KeptMemory | None, ranks: Communicator, device: torch.device) -> bool:
    """Whether each of the ranks that load a model together has a file, and all are of the same weights."""
    digest = b"" if kept is None else str(kept.facts["weights_digest"]).encode()
    own = torch.frombuffer(bytearray(hashlib.sha256(digest).digest()), dtype=torch.uint8).view(1, -1).to(device)
    width = own.shape[1]
    everyone = ranks.all_gather(own, (width,) * ranks.size).view(ranks.size, width)
    return kept is not None and bool((everyone == own).all())


def _say_not_kept(error: Exception) -> None:
    """Log why packed weights outlive nothing: a setting's matter, as in a container whose files cannot be written."""
    logger.info("packed weights are not kept in a file", extra={"error": str(error)})


def _read_whole(fd: int, recipe: str, num_threads: int, on_progress: Callable[[float], None]) -> KeptMemory:
    """The data in new memory, and the header.

    Raises:
        OSError: the file cannot be read.
        PackedFileError: it is damaged, or was made of something else.
    """
    num_bytes, header = read_header(fd)
    if header.get("recipe") != recipe:
        raise PackedFileError("it was made of something else")
    view = memoryview(huge_memory(max(num_bytes, 1)))[:num_bytes]

    def read_chunk(number: int) -> None:
        first = number * CHUNK_BYTES
        chunk = view[first : first + CHUNK_BYTES]
        done = 0
        while done < len(chunk):
            count = os.preadv(fd, [chunk[done:]], first + done)
            if not count:
                raise PackedFileError("it ends early")
            done += count
        if zlib.crc32(chunk) != header["checksums"][number]:
            raise PackedFileError("its data has changed")

    pool = ThreadPoolExecutor(num_threads, "read-packed")
    try:
        for number, _ in enumerate(pool.map(read_chunk, range(len(header["checksums"])))):
            on_progress((number + 1) / len(header["checksums"]))
    finally:
        pool.shutdown(cancel_futures=True)
    return KeptMemory(view, header)
