"""A model directory's safetensors files: mapped, checked and hashed, never copied as a whole.

Other formats are not read, as they can run code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.worker.weights.tensor_digests import Hashing, TensorDigests
from shared.model_files.model_dir import WEIGHTS_INDEX, ModelDirectoryError, read_json, refuse_pointer, weight_paths

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
# torch's names of those that are written here, which digests are made of.
_TORCH_NAMES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}
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


def dtype_bytes(dtype: str) -> int:
    """The size of a value of a dtype by safetensors' name."""
    return _DTYPE_BYTES[dtype]


def digest_of(tensors: Mapping[str, tuple[TensorHeader, bytes]]) -> str:
    """What `WeightFiles.digest()` is for tensors with these headers and SHA-256 of their bytes."""
    entries = {
        name: (_entry(name, _TORCH_NAMES[header.dtype], header.shape), digest)
        for name, (header, digest) in tensors.items()
    }
    return _digest(entries)


class WeightFiles:
    """The tensors of a model directory, each in exactly one file.

    A context manager. Tensors returned are views of mapped files and must not be kept.
    """

    def __init__(
        self,
        model_dir: Path,
        on_progress: Callable[[float], None] = lambda _: None,
        *,
        hashing: Hashing = _ALONE,
        name_of: Callable[[str], str | None] = str,
    ) -> None:
        """Open the files and check their headers, also against those of the other ranks that read them.

        Args:
            on_progress: Called with the fraction of all bytes read, 0 to 1.
            hashing: By which ranks and threads the tensors are hashed.
            name_of: What a stored tensor is called here; None leaves it out.

        Raises:
            ModelDirectoryError: a file is missing, truncated or malformed, the index and the files disagree, two
                tensors have the same name, or ranks have different headers.
        """
        self.model_dir = model_dir
        self._on_progress = on_progress
        self._open_files = ExitStack()
        paths = weight_paths(model_dir)
        stored_to_file = _locate({path: self._open(path) for path in paths})
        self._check_index(stored_to_file.keys())
        self._name_to_stored = _rename(model_dir, stored_to_file, name_of)
        self._name_to_file = {name: stored_to_file[stored] for name, stored in self._name_to_stored.items()}
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
        tensor: Tensor = self._name_to_file[name].get_tensor(self._name_to_stored[name])
        if name not in self._name_to_entry:
            self._name_to_entry[name] = _entry(name, tensor.dtype, tensor.shape)
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
        return _digest({name: (self._name_to_entry[name], each) for name, each in digests.items()})

    def _open(self, path: Path) -> Any:
        """safetensors checks the header against the file's size."""
        refuse_pointer(path)
        try:
            return self._open_files.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise ModelDirectoryError(f"{path}: {error}") from error

    def _header(self, name: str) -> TensorHeader:
        header = self._name_to_file[name].get_slice(self._name_to_stored[name])
        return TensorHeader(header.get_dtype(), tuple(header.get_shape()))

    def _check_index(self, stored: Set[str]) -> None:
        if not (self.model_dir / WEIGHTS_INDEX).exists():
            return
        listed = set(read_json(self.model_dir, WEIGHTS_INDEX)["weight_map"])
        if different := listed.symmetric_difference(stored):
            raise ModelDirectoryError(
                f"{self.model_dir / WEIGHTS_INDEX}: index and files disagree about tensor {min(different)}"
                + (f" and {len(different) - 1} more" if len(different) > 1 else "")
            )


def _entry(name: str, dtype: torch.dtype, shape: Iterable[int]) -> str:
    return f"{name} {dtype} {list(shape)}"


def _digest(entries: Mapping[str, tuple[str, bytes]]) -> str:
    """The digest of entries and digests by name."""
    lines = (f"{entry} {digest.hex()}\n" for _, (entry, digest) in sorted(entries.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _locate(files: dict[Path, Any]) -> dict[str, Any]:
    name_to_file: dict[str, Any] = {}
    for path, file in files.items():
        for name in file.keys():  # noqa: SIM118 - not a mapping
            if name in name_to_file:
                raise ModelDirectoryError(f"{path}: tensor {name} is also in another file")
            name_to_file[name] = file
    return name_to_file


def _rename(model_dir: Path, stored: Iterable[str], name_of: Callable[[str], str | None]) -> dict[str, str]:
    """Stored names, by the names that they have here."""
    name_to_stored: dict[str, str] = {}
    for each in stored:
        if (name := name_of(each)) is None:
            continue
        if name in name_to_stored:
            raise ModelDirectoryError(f"{model_dir}: {name_to_stored[name]} and {each} are both {name} of the text")
        name_to_stored[name] = each
    return name_to_stored
