"""Linear layers and embeddings: kernels/linear.cpp and kernels/embedding.cpp."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from struct import Struct

import torch
from torch import Tensor

from services.worker.ops.matrices import BlockMatrix, JoinedMatrix, Matrix, split_order
from services.worker.ops.native.elementwise import take_columns
from services.worker.ops.native.formats import FORMATS
from services.worker.ops.native.packed import PackedMatrix
from services.worker.ops.native.results import Results
from services.worker.ops.native.state import NativeState
from services.worker.ops.protocol import EmbeddingKernel, LinearKernel

_linear = Struct("PPqP3q").pack
_rows = Struct("PPqP").pack
_take = Struct("P2qPqP").pack


def prepare_linear(native: NativeState, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> LinearKernel:
    """Pack the matrix."""
    if isinstance(weight, JoinedMatrix):
        biases = itertools.repeat(None) if bias is None else torch.split(bias, [part.shape[0] for part in weight.parts])
        pairs = zip(weight.parts, biases, strict=False)
        packed = [native.pack(part, part_bias, dtype) for part, part_bias in pairs]
        return NativeLinear(native.library, packed, dtype, native.results)
    return _prepare_product(native, weight, bias, dtype, dtype)


def prepare_head(native: NativeState, weight: Matrix, dtype: torch.dtype) -> LinearKernel:
    """Pack the matrix, whose products are in float32."""
    return _prepare_product(native, weight, None, dtype, torch.float32)


def prepare_embedding(native: NativeState, weight: Matrix, dtype: torch.dtype) -> EmbeddingKernel:
    """Keep the matrix: GGUF's blocks packed, in which most files have it, others dense."""
    if isinstance(weight, BlockMatrix):
        return NativeEmbedding(native.library, native.pack(weight, None, dtype), native.results)
    return NativeTable(native.library, native.keep_table(weight, dtype), native.results)


def prepare_tied(native: NativeState, weight: Matrix, dtype: torch.dtype) -> tuple[EmbeddingKernel, LinearKernel]:
    """Pack the matrix once, for both."""
    packed = native.pack(weight, None, dtype)
    embedding = NativeEmbedding(native.library, packed, native.results)
    return embedding, NativeLinear(native.library, [packed], torch.float32, native.results)


def _prepare_product(
    native: NativeState, weight: Matrix, bias: Tensor | None, dtype: torch.dtype, output_dtype: torch.dtype
) -> LinearKernel:
    stored, order = split_order(weight)
    packed = native.pack(stored, bias, dtype)
    reorder = None if order is None else partial(take_columns, native, columns=order)
    return NativeLinear(native.library, [packed], output_dtype, native.results, reorder)


class NativeLinear:
    """A product with packed matrices, whose results are side by side."""

    __slots__ = (
        "_addresses",
        "_dtype",
        "_function",
        "_num_inputs",
        "_num_outputs",
        "_output_dtype",
        "_output_format",
        "_packed",
        "_reorder",
        "_results",
    )

    def __init__(
        self,
        library: ctypes.CDLL,
        packed: Sequence[PackedMatrix],
        output_dtype: torch.dtype,
        results: Results,
        reorder: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Multiply with `packed`, at least one.

        Args:
            output_dtype: The dtype of all of them, or float32.
            reorder: Puts the columns of rows in the order of the matrices'; None means that they are in it.
        """
        self._function = library.ls_linear
        self._output_dtype, self._output_format = output_dtype, FORMATS[output_dtype]
        self._packed, self._results, self._reorder = packed, results, reorder
        self._dtype, self._num_inputs = packed[0].dtype, packed[0].num_columns
        # Each with the place of its results in a row, in bytes.
        places = itertools.accumulate((part.num_rows * output_dtype.itemsize for part in packed), initial=0)
        self._addresses = [(part.address, place) for part, place in zip(packed, places, strict=False)]
        self._num_outputs = sum(part.num_rows for part in packed)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] to a new [T, out_features].

        Raises:
            ValueError: `x` has another shape or dtype.
        """
        num_rows, width = x.shape
        if width != self._num_inputs or x.dtype is not self._dtype:
            raise ValueError(f"expected [T, {self._num_inputs}] {self._dtype}, got {list(x.shape)} {x.dtype}")
        if self._reorder is not None:
            x = self._reorder(x)
        row_stride, column_stride = x.stride()
        if column_stride != 1:
            x = x.contiguous()
            row_stride = width
        output = self._results.empty(num_rows, self._num_outputs, dtype=self._output_dtype)
        source, target, sizes = x.data_ptr(), output.data_ptr(), (self._num_outputs, num_rows, self._output_format)
        for address, place in self._addresses:
            self._function(_linear(address, source, row_stride, target + place, *sizes))
        return output


class NativeTable:
    """See `EmbeddingKernel`: rows of a tensor."""

    __slots__ = ("_function", "_results", "_table", "_table_fields")

    def __init__(self, library: ctypes.CDLL, table: Tensor, results: Results) -> None:
        """`table` is contiguous, and is kept."""
        self._function = library.ls_take_rows
        self._table, self._results = table, results
        self._table_fields = table.data_ptr(), len(table), table[0].nbytes

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] int64 to a new [T, hidden].

        Raises:
            IndexError: an id is not a row of the table.
        """
        token_ids, table = token_ids.contiguous(), self._table
        output = self._results.empty(len(token_ids), table.shape[1], dtype=table.dtype)
        place = self._function(_take(*self._table_fields, token_ids.data_ptr(), len(token_ids), output.data_ptr()))
        if place != len(token_ids):
            raise _no_such_row(token_ids, place, len(table))
        return output


class NativeEmbedding:
    """See `EmbeddingKernel`: rows of the matrix that the head multiplies by."""

    __slots__ = ("_function", "_packed", "_results")

    def __init__(self, library: ctypes.CDLL, packed: PackedMatrix, results: Results) -> None:
        self._function = library.ls_rows
        self._packed, self._results = packed, results

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] int64 to a new [T, hidden].

        Raises:
            IndexError: an id is not a row of the matrix.
        """
        token_ids, packed = token_ids.contiguous(), self._packed
        output = self._results.empty(len(token_ids), packed.num_columns, dtype=packed.dtype)
        place = self._function(_rows(packed.address, token_ids.data_ptr(), len(token_ids), output.data_ptr()))
        if place != len(token_ids):
            raise _no_such_row(token_ids, place, packed.num_rows)
        return output


def _no_such_row(token_ids: Tensor, place: int, num_rows: int) -> IndexError:
    return IndexError(f"token id {int(token_ids[place])} is not in a vocabulary of {num_rows}")
