"""Answers what a model's layers read and pack from what was recorded, in the order in which it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from services.worker.ops.matrices import Matrix
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.prepared import KeptError, Prepared
from services.worker.weights.model_weights import ALL, ModelWeights
from services.worker.weights.packed.descriptions import read_matrix, read_tensor

_HOST = torch.device("cpu")


class KeptMemory:
    """The data of a file, in this process's memory, with the header that says what is where."""

    def __init__(self, memory: memoryview, header: dict[str, Any]) -> None:
        """Take the bytes of `memory`, which nobody writes any more."""
        self._memory = memory
        self._prepared = iter(header["prepared"])
        self._header = header
        self.facts: dict[str, Any] = header["facts"]
        """What the writer added about the model."""

    @property
    def num_bytes(self) -> int:
        """The data's."""
        return len(self._memory)

    def keep(self, make: Callable[[], Prepared]) -> Prepared:  # noqa: ARG002 - the kept one is returned instead
        """See `Keep`.

        Raises:
            KeptError: more is asked for than was kept.
        """
        entry = next(self._prepared, None)
        if entry is None:
            raise KeptError("fewer matrices than the model has")
        numbers, tensors = entry
        return Prepared(
            tuple(numbers), tuple(None if each is None else read_tensor(each, self.read_at) for each in tensors)
        )

    def weights(self, dtype: torch.dtype, packed_formats: Iterable[MatrixFormat]) -> ReplayedWeights:
        """What the layers read."""
        return ReplayedWeights(self, dtype, set(packed_formats), self._header)

    def read_at(self, place: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
        """A view of the bytes from `place` on.

        Raises:
            KeptError: they are not all there.
        """
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        if min(shape, default=0) < 0 or place < 0 or place + count * dtype.itemsize > len(self._memory):
            raise KeptError("a tensor outside the data")
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=place).view(shape)

    def check_used(self) -> None:
        """Raise `KeptError` if the model packed less than was kept."""
        if next(self._prepared, None) is not None:
            raise KeptError("more matrices than the model has")


class ReplayedWeights(ModelWeights):
    """Weights as they were read when they were recorded. Matrices that are packed have no values."""

    def __init__(
        self, memory: KeptMemory, dtype: torch.dtype, packed_formats: set[MatrixFormat], header: dict[str, Any]
    ) -> None:
        self.dtype = dtype
        self.device = _HOST
        self.packed_formats = packed_formats
        self._memory = memory
        self._contained = header["contained"]
        self._read = iter(header["read"])

    def __contains__(self, name: str) -> bool:
        if name not in self._contained:
            raise KeptError(f"nothing about {name}")
        return bool(self._contained[name])

    @override
    def read(self, name: str, shape: tuple[int, ...], *, rows: slice = ALL, dtype: torch.dtype | None = None) -> Tensor:
        return self._values("read", name)

    @override
    def scale(self, names: Sequence[str]) -> Tensor:
        return self._values("scale", names[0])

    @override
    def linear(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Matrix:
        return self._matrix("linear", name)

    @override
    def expert(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Matrix:
        return self._matrix("expert", name)

    @override
    def dense(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        return self._values("dense", name)

    @override
    def embedding(self, name: str, shape: tuple[int, int], *, rows: slice = ALL) -> Matrix:
        return self._matrix("embedding", name)

    @override
    def head(self, name: str, shape: tuple[int, int], *, rows: slice = ALL) -> Matrix:
        return self._matrix("head", name)

    @override
    def stacked(
        self,
        name: str,
        shape: tuple[int, int, int],
        expert: int,
        *,
        rows: slice = ALL,
        columns: slice = ALL,
        in_any_order: bool = False,
    ) -> Matrix:
        return self._matrix("stacked", name)

    @override
    def differ(self, name: str, other: str) -> bool:
        return bool(self._next("differ", name))

    @override
    def ignore(
        self, *, prefixes: Sequence[str] = (), suffixes: Sequence[str] = (), patterns: Sequence[str] = ()
    ) -> None:
        """Nothing: what was recorded was complete."""

    @override
    def check_complete(self) -> None:
        """Raise `KeptError` unless all that was recorded has been read."""
        if next(self._read, None) is not None:
            raise KeptError("more tensors than the model reads")
        self._memory.check_used()

    def _values(self, method: str, name: str) -> Tensor:
        # The caller may write to it.
        return read_tensor(self._next(method, name), self._memory.read_at).clone()

    def _matrix(self, method: str, name: str) -> Matrix:
        return read_matrix(self._next(method, name), self._memory.read_at)

    def _next(self, method: str, name: str) -> Any:
        entry = next(self._read, None)
        if entry is None or entry[:2] != [method, name]:
            raise KeptError(f"another tensor than {name}")
        return entry[2]
