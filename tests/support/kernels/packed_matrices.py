"""Random matrices in every format that backends for GPUs keep."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from services.worker.ops.matrices import Fp8Matrix, IntMatrix, Matrix, Mxfp4Matrix
from services.worker.ops.matrix_rows import MatrixFormat
from tests.support.kernels.attention_batches import random


@dataclass(frozen=True)
class MatrixKind:
    """A format and what it leaves open."""

    format: MatrixFormat | None
    """None is a tensor."""
    group_size: int = 4096
    has_offsets: bool = False

    @property
    def column_multiple(self) -> int:
        """What the number of columns is a multiple of."""
        return {MatrixFormat.INT4: 2, MatrixFormat.MXFP4: 32}.get(self.format, 1) if self.format else 1

    def make(self, num_rows: int, num_columns: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Matrix:
        """A matrix [num_rows, num_columns] whose products with random rows are about as large as these.

        Its numbers are exact in bfloat16 unless it has offsets.
        """
        if self.format is None:
            return (random(num_rows, num_columns, seed=seed) / math.sqrt(num_columns)).to(dtype)
        if self.format is MatrixFormat.MXFP4:
            exponents = integers(120, 127, num_rows, num_columns // 32, seed=seed + 1).to(torch.uint8)
            return Mxfp4Matrix(integers(0, 256, num_rows, num_columns // 2, seed=seed).to(torch.uint8), exponents)
        groups = num_rows, -(-num_columns // self.group_size)
        offsets = random(*groups, seed=seed + 2) / 8 if self.has_offsets else None
        powers = integers(1, 3, *groups, seed=seed + 1).float().exp2()
        if self.format is MatrixFormat.FP8:
            # The largest numbers, up to 448, are left out.
            signs = integers(0, 2, num_rows, num_columns, seed=seed + 2) * 128
            codes = integers(0, 0x60, num_rows, num_columns, seed=seed) + signs
            return Fp8Matrix(codes.to(torch.uint8), powers / 256, self.group_size)
        if self.format is MatrixFormat.INT4:
            codes = integers(0, 256, num_rows, num_columns // 2, seed=seed).to(torch.uint8)
            return IntMatrix(4, codes, powers / 128, self.group_size, offsets)
        codes = integers(-128, 128, num_rows, num_columns, seed=seed).to(torch.int8)
        return IntMatrix(8, codes, powers / 2048, self.group_size, offsets)


PLAIN_NUMBERS = MatrixKind(None)
KINDS = (
    MatrixKind(MatrixFormat.INT8),
    MatrixKind(MatrixFormat.INT8, 32, has_offsets=True),
    MatrixKind(MatrixFormat.INT4, 16),
    MatrixKind(MatrixFormat.INT4, 96, has_offsets=True),
    MatrixKind(MatrixFormat.INT4),
    MatrixKind(MatrixFormat.FP8, 24),
    MatrixKind(MatrixFormat.FP8),
    MatrixKind(MatrixFormat.MXFP4),
)


def matrix_kinds() -> st.SearchStrategy[MatrixKind]:
    """Every format, with groups that do and do not divide the kernels' tiles."""
    group_sizes = st.sampled_from([1, 8, 24, 32, 128, 4096])
    formats = st.sampled_from([MatrixFormat.INT8, MatrixFormat.INT4])
    floats = st.just(MatrixKind(MatrixFormat.MXFP4)) | st.builds(MatrixKind, st.just(MatrixFormat.FP8), group_sizes)
    return floats | st.builds(MatrixKind, formats, group_sizes, st.booleans())


def integers(low: int, high: int, *shape: int, seed: int) -> Tensor:
    """Random integers in [low, high)."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))
