"""Writes what a model's layers read and what is packed of it, in the order in which they ask for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from services.worker.ops.matrices import Matrix
from services.worker.ops.prepared import Packing, Prepared
from services.worker.weights.model_weights import ALL, ModelWeights
from services.worker.weights.packed.descriptions import describe_matrix, describe_tensor
from shared.model_files.packed_files import PackedFile


class Recorder:
    """Writes into one file until something cannot be written; the load goes on without it then. A context manager."""

    def __init__(self, file: PackedFile) -> None:
        self.prepared: list[Any] = []
        """What was packed: numbers, and descriptions of tensors."""
        self.read: list[Any] = []
        """What was read: method, name and result."""
        self.contained: dict[str, bool] = {}
        """Whether tensors that were asked for are stored."""
        self.error: OSError | None = None
        """Why nothing more is written."""
        self._file = file

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def keeps(self, packing: Packing | None) -> AbstractContextManager[None]:
        """Record what is packed, in this block."""
        assert packing is not None, "only packed weights are recorded"
        return packing.kept_by(self.keep)

    def publish(self, recipe: str, header: Mapping[str, Any]) -> int:
        """End the file; see `PackedFile.publish`.

        Raises:
            OSError: it could not be written.
        """
        if self.error is not None:
            raise self.error
        notes = {"prepared": self.prepared, "read": self.read, "contained": self.contained}
        return self._file.publish(recipe, {**header, **notes})

    def keep(self, make: Callable[[], Prepared]) -> Prepared:
        """See `Keep`."""
        made = make()
        self._note(
            self.prepared,
            lambda: [
                list(made.numbers),
                [None if each is None else describe_tensor(each, self._append) for each in made.tensors],
            ],
        )
        return made

    def note_values(self, method: str, name: str, tensor: Tensor) -> None:
        """Record a tensor with its values."""
        self._note(self.read, lambda: [method, name, describe_tensor(tensor, self._append)])

    def note_matrix(self, method: str, name: str, matrix: Matrix) -> None:
        """Record a matrix that will be packed."""
        self._note(self.read, lambda: [method, name, describe_matrix(matrix, self._append)])

    def note_answer(self, method: str, name: str, *, answer: bool) -> None:
        """Record an answer."""
        self._note(self.read, lambda: [method, name, answer])

    def _note(self, notes: list[Any], describe: Callable[[], Any]) -> None:
        if self.error is None:
            try:
                notes.append(describe())
            except OSError as error:
                self.error = error

    def _append(self, tensor: Tensor) -> int:
        return self._file.append(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


class RecordedWeights(ModelWeights):
    """Weights whose reads are recorded."""

    def __init__(self, weights: ModelWeights, recorder: Recorder) -> None:
        """Read from `weights`."""
        self.dtype = weights.dtype
        self.device = weights.device
        self.packed_formats = weights.packed_formats
        self._weights = weights
        self._recorder = recorder

    def __contains__(self, name: str) -> bool:
        self._recorder.contained[name] = name in self._weights
        return self._recorder.contained[name]

    @override
    def read(self, name: str, shape: tuple[int, ...], *, rows: slice = ALL, dtype: torch.dtype | None = None) -> Tensor:
        return self._values("read", name, self._weights.read(name, shape, rows=rows, dtype=dtype))

    @override
    def scale(self, names: Sequence[str]) -> Tensor:
        return self._values("scale", names[0], self._weights.scale(names))

    @override
    def linear(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Matrix:
        return self._matrix("linear", name, self._weights.linear(name, shape, rows=rows, columns=columns))

    @override
    def expert(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Matrix:
        return self._matrix("expert", name, self._weights.expert(name, shape, rows=rows, columns=columns))

    @override
    def dense(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        return self._values("dense", name, self._weights.dense(name, shape, rows=rows, columns=columns))

    @override
    def embedding(self, name: str, shape: tuple[int, int], *, rows: slice = ALL) -> Matrix:
        return self._matrix("embedding", name, self._weights.embedding(name, shape, rows=rows))

    @override
    def head(self, name: str, shape: tuple[int, int], *, rows: slice = ALL) -> Matrix:
        return self._matrix("head", name, self._weights.head(name, shape, rows=rows))

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
        part = self._weights.stacked(name, shape, expert, rows=rows, columns=columns, in_any_order=in_any_order)
        return self._matrix("stacked", name, part)

    @override
    def differ(self, name: str, other: str) -> bool:
        answer = self._weights.differ(name, other)
        self._recorder.note_answer("differ", name, answer=answer)
        return answer

    @override
    def ignore(
        self, *, prefixes: Sequence[str] = (), suffixes: Sequence[str] = (), patterns: Sequence[str] = ()
    ) -> None:
        self._weights.ignore(prefixes=prefixes, suffixes=suffixes, patterns=patterns)

    @override
    def check_complete(self) -> None:
        self._weights.check_complete()

    def _values(self, method: str, name: str, tensor: Tensor) -> Tensor:
        # Written at once: the caller may change it.
        self._recorder.note_values(method, name, tensor)
        return tensor

    def _matrix(self, method: str, name: str, matrix: Matrix) -> Matrix:
        self._recorder.note_matrix(method, name, matrix)
        return matrix
