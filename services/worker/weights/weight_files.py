"""A model directory's safetensors files: mapped, checked and hashed, never copied as a whole.

Other formats are not read, as they can run code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.worker.weights.tensor_digests import Hashing, TensorDigests
from shared.missing_files import weights_advice
from shared.model_dir import ModelDirectoryError, read_json, refuse_pointer

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# safetensors' names of the supported formats' dtypes, and their sizes.
_DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_ALONE = Hashing()


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor's header."""

    dtype: str
    """safetensors' name: F32, BF16, F8_E4M3, I32 and so on."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """0 for a dtype that no format uses."""
        return int(torch.Size(self.shape).numel()) * _DTYPE_BYTES.get(self.dtype, 0)


class WeightFiles:
    """The tensors of a model directory, each in exactly one file.

    A context manager. Tensors returned are views of mapped files and must not be kept.
    """

    def __init__(
        self, model_dir: Path, on_progress: Callable[[float], None] = lambda _: None, *, hashing: Hashing = _ALONE
    ) -> None:
        """Open the files and check their headers, also against those of the other ranks that read them.

        Args:
            on_progress: Called with the fraction of all bytes read, 0 to 1.
            hashing: By which ranks and threads the tensors are hashed.

        Raises:
            ModelDirectoryError: a file is missing, truncated or malformed, the index and the files disagree, or ranks
                have different headers.
        """
        self.model_dir = model_dir
        self._on_progress = on_progress
        self._open_files = ExitStack()
        paths = _weight_paths(model_dir)
        self._name_to_file = _locate({path: self._open(path) for path in paths})
        self._check_index()
        self._headers = {name: self._header(name) for name in self._name_to_file}
        self.num_bytes = sum(header.num_bytes for header in self._headers.values())
        self._num_bytes_read = 0
        self._name_to_entry: dict[str, str] = {}
        self._name_to_digest: dict[str, bytes] | None = None
        sizes = {name: header.num_bytes for name, header in self._headers.items()}
        self._digests = TensorDigests(paths, sizes, repr(sorted(self._headers.items())), hashing)
        self._open_files.callback(self._digests.close)

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open_files.__exit__(kind, error, tb)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(self._name_to_file))

    def header(self, name: str) -> TensorHeader | None:
        """None if there is no such tensor."""
        return self._headers.get(name)

    def read(self, name: str) -> Tensor:
        """A view of the mapped file, in its dtype. Reports progress.

        The first read has the whole tensor hashed, by this rank or another one, even if ranks need only part of it: so
        all have the same digest. Other threads do that, since it takes as long as converting the tensor.
        """
        tensor: Tensor = self._name_to_file[name].get_tensor(name)
        if name not in self._name_to_entry:
            self._name_to_entry[name] = f"{name} {tensor.dtype} {list(tensor.shape)}"
            self._digests.add(name, tensor)
            self._num_bytes_read += self._headers[name].num_bytes
            self._on_progress(self._num_bytes_read / max(self.num_bytes, 1))
        return tensor

    def digest(self, *, without: tuple[str, ...] = ()) -> str:
        """SHA-256 over name, dtype, shape and bytes of every tensor read, in hex. The first call waits for other ranks.

        No tensor may be read after it.

        Independent of the split into files, of how much of each tensor was used, and of the number of ranks.

        Args:
            without: Prefixes of the names of tensors that are left out.

        Raises:
            ModelDirectoryError: ranks have read different tensors.
        """
        if self._name_to_digest is None:
            self._name_to_digest = self._digests.exchange()
        digests = {name: each for name, each in self._name_to_digest.items() if not name.startswith(without)}
        lines = (f"{self._name_to_entry[name]} {digests[name].hex()}\n" for name in sorted(digests))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def _open(self, path: Path) -> Any:
        """safetensors checks the header against the file's size."""
        refuse_pointer(path)
        try:
            return self._open_files.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise ModelDirectoryError(f"{path}: {error}") from error

    def _header(self, name: str) -> TensorHeader:
        header = self._name_to_file[name].get_slice(name)
        return TensorHeader(header.get_dtype(), tuple(header.get_shape()))

    def _check_index(self) -> None:
        if not (self.model_dir / INDEX_FILE).exists():
            return
        listed = set(read_json(self.model_dir, INDEX_FILE)["weight_map"])
        if different := listed.symmetric_difference(self._name_to_file):
            raise ModelDirectoryError(
                f"{self.model_dir / INDEX_FILE}: index and files disagree about tensor {min(different)}"
                + (f" and {len(different) - 1} more" if len(different) > 1 else "")
            )


def _weight_paths(model_dir: Path) -> list[Path]:
    if (model_dir / INDEX_FILE).exists():
        weight_map = read_json(model_dir, INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelDirectoryError(f"{model_dir / INDEX_FILE}: no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        # A shard's name is untrusted input: it must not point outside the directory.
        if outside := [name for name in names if Path(name).name != name]:
            raise ModelDirectoryError(f"{model_dir / INDEX_FILE}: {outside[0]!r} is not a plain file name")
        if missing := [name for name in names if not (model_dir / name).is_file()]:
            raise ModelDirectoryError(f"{model_dir / INDEX_FILE}: files are missing: {', '.join(missing)}")
        return [model_dir / name for name in names]
    if not (model_dir / SINGLE_FILE).is_file():
        raise ModelDirectoryError(f"{model_dir / SINGLE_FILE}: no such file; {weights_advice(model_dir)}")
    return [model_dir / SINGLE_FILE]


def _locate(files: dict[Path, Any]) -> dict[str, Any]:
    name_to_file: dict[str, Any] = {}
    for path, file in files.items():
        for name in file.keys():  # noqa: SIM118 - not a mapping
            if name in name_to_file:
                raise ModelDirectoryError(f"{path}: tensor {name} is also in another file")
            name_to_file[name] = file
    return name_to_file
