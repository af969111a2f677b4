"""Launches of products with packed weights, with the shapes of published models, only to compile."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.ops.matrices import IntMatrix, Mxfp4Matrix
from services.worker.ops.triton.linear import PackedEmbedding, PackedLinear

BF16 = torch.bfloat16
# The sizes of Qwen3-8B.
HIDDEN, INNER, VOCABULARY = 4096, 12288, 151_936


def launch_products(num_tokens: int, *, offset: int = 0) -> None:
    """A step's products with weights in every format, and embeddings; token ids begin at `offset` in longer ones."""
    token_ids = on_meta(torch.int64, offset + num_tokens)[offset:]
    for weight in (
        int8(2 * INNER, HIDDEN),
        int4(2 * INNER, HIDDEN, group_size=128),
        # As GGUF's Q4_1.
        int4(2 * INNER, HIDDEN, group_size=32, has_offsets=True),
        mxfp4(2 * INNER, HIDDEN),
    ):
        PackedLinear(weight, None, BF16)(on_meta(BF16, num_tokens, HIDDEN))
        PackedLinear(weight, None, torch.float32)(on_meta(torch.float32, num_tokens, HIDDEN))
    PackedLinear(int8(HIDDEN, HIDDEN), on_meta(BF16, HIDDEN), BF16)(on_meta(BF16, num_tokens, HIDDEN))
    PackedEmbedding(int8(VOCABULARY, HIDDEN), BF16)(token_ids)


def int8(num_rows: int, num_columns: int) -> IntMatrix:
    """With a scale per row."""
    codes = on_meta(torch.int8, num_rows, num_columns)
    return IntMatrix(8, codes, on_meta(torch.float32, num_rows, 1), num_columns)


def int4(num_rows: int, num_columns: int, *, group_size: int, has_offsets: bool = False) -> IntMatrix:
    """With a scale per group of columns."""
    scales = on_meta(torch.float32, num_rows, num_columns // group_size)
    codes = on_meta(torch.uint8, num_rows, num_columns // 2)
    return IntMatrix(4, codes, scales, group_size, scales if has_offsets else None)


def mxfp4(num_rows: int, num_columns: int) -> Mxfp4Matrix:
    """As gpt-oss's experts."""
    codes = on_meta(torch.uint8, num_rows, num_columns // 2)
    return Mxfp4Matrix(codes, on_meta(torch.uint8, num_rows, num_columns // 32))


def on_meta(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
