"""A model directory's safetensors: read tensor by tensor, checked, hashed, and never copied as a whole.

Files are mapped, so a tensor costs memory only where its reader copies it. Other formats are not read: they could
run code (DESIGN §6).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.model_dir import ModelDirectoryError, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Names of safetensors' dtypes that weights may have, and their size.
_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class WeightFiles:
    """The tensors of a model directory, each read at most once.

    Invariant: every tensor is listed by exactly one file, and is of a float dtype.

    A context manager: tensors that `read` returned are views of mapped files and must not be kept.
    """

    def __init__(self, model_dir: Path, on_progress: Callable[[float], None] = lambda _: None) -> None:
        """Open the files and check their headers.

        Raises:
            ModelDirectoryError: a file is missing, truncated or malformed, the index and the files disagree, or a
                tensor is not of a float dtype.
        """
        self._model_dir = model_dir
        self._on_progress = on_progress
        self._open_files = ExitStack()
        self._name_to_file = _locate({path: self._open(path) for path in _weight_paths(model_dir)})
        self._check_index()
        self._num_bytes = {name: self._checked_size(name) for name in self._name_to_file}
        self._total_bytes = sum(self._num_bytes.values())
        self._bytes_read = 0
        self._entries: dict[str, str] = {}

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open_files.__exit__(kind, error, tb)

    def __contains__(self, name: str) -> bool:
        return name in self._name_to_file

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors, sorted."""
        return tuple(sorted(self._name_to_file))

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """One tensor, in the file's dtype: a view of the mapped file. Hashes it and reports progress.

        Args:
            name: The tensor's.
            shape: What the configuration asks for; None takes any.

        Raises:
            ModelDirectoryError: there is no such tensor, or its shape is another one.
        """
        file = self._name_to_file.get(name)
        if file is None:
            raise ModelDirectoryError(f"{self._model_dir}: tensor {name} is missing")
        tensor: Tensor = file.get_tensor(name)
        if shape is not None and tuple(tensor.shape) != shape:
            raise ModelDirectoryError(
                f"{self._model_dir}: tensor {name} has shape {list(tensor.shape)}, not {list(shape)} as configured"
            )
        if name not in self._entries:
            self._entries[name] = _digest_entry(name, tensor)
            self._bytes_read += self._num_bytes[name]
            self._on_progress(self._bytes_read / self._total_bytes)
        return tensor

    def check_all_read(self, *, ignored_suffixes: tuple[str, ...] = ()) -> None:
        """Refuse a directory that holds tensors which the model did not ask for.

        Args:
            ignored_suffixes: Names ending like this may be left over. They are read here, for the digest.

        Raises:
            ModelDirectoryError: it names the first of them.
        """
        for name in self.names:
            if name in self._entries:
                continue
            if not name.endswith(ignored_suffixes):
                raise ModelDirectoryError(f"{self._model_dir}: tensor {name} has no place in this architecture")
            self.read(name)

    def digest(self) -> str:
        """SHA-256 over name, dtype, shape and bytes of every tensor, in hex; equal for equal weights.

        How they are spread over files does not matter. All tensors must have been read.
        """
        assert len(self._entries) == len(self._name_to_file), "digest() before every tensor was read"
        lines = "".join(self._entries[name] for name in self.names)
        return hashlib.sha256(lines.encode()).hexdigest()

    def _open(self, path: Path) -> Any:
        """A handle of safetensors' reader, which checks the header against the file's size."""
        try:
            return self._open_files.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise ModelDirectoryError(f"{path}: {error}") from error

    def _check_index(self) -> None:
        if not (self._model_dir / INDEX_FILE).exists():
            return
        listed = set(read_json(self._model_dir, INDEX_FILE)["weight_map"])
        if different := listed.symmetric_difference(self._name_to_file):
            raise ModelDirectoryError(
                f"{self._model_dir / INDEX_FILE}: index and files disagree about tensor {min(different)}"
            )

    def _checked_size(self, name: str) -> int:
        header = self._name_to_file[name].get_slice(name)
        dtype = header.get_dtype()
        if dtype not in _DTYPE_BYTES:
            raise ModelDirectoryError(f"{self._model_dir}: tensor {name} has dtype {dtype}, which is not supported")
        return int(torch.Size(header.get_shape()).numel()) * _DTYPE_BYTES[dtype]


class ModelWeights:
    """The weights of a model as it asks for them: checked, and in the dtype it runs in."""

    def __init__(self, files: WeightFiles, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._files = files

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor in `dtype`; it may be a view of the file: copy what is kept.

        Raises:
            ModelDirectoryError: there is no such tensor, or its shape is another one.
        """
        return self._files.read(name, shape).to(self.dtype)

    def check_all_read(self, *, ignored_suffixes: tuple[str, ...]) -> None:
        """See `WeightFiles.check_all_read`."""
        self._files.check_all_read(ignored_suffixes=ignored_suffixes)


def _weight_paths(model_dir: Path) -> list[Path]:
    if (model_dir / INDEX_FILE).exists():
        weight_map = read_json(model_dir, INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelDirectoryError(f"{model_dir / INDEX_FILE}: no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        # A shard's name comes from a file: it must not lead out of the directory.
        if outside := [name for name in names if Path(name).name != name]:
            raise ModelDirectoryError(f"{model_dir / INDEX_FILE}: {outside[0]!r} is no plain file name")
        return [model_dir / name for name in names]
    return [model_dir / SINGLE_FILE]


def _locate(files: dict[Path, Any]) -> dict[str, Any]:
    name_to_file: dict[str, Any] = {}
    for path, file in files.items():
        for name in file.keys():  # noqa: SIM118 - not a mapping
            if name in name_to_file:
                raise ModelDirectoryError(f"{path}: tensor {name} is in another file too")
            name_to_file[name] = file
    return name_to_file


def _digest_entry(name: str, tensor: Tensor) -> str:
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    return f"{name} {tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}\n"
