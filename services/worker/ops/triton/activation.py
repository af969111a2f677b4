"""The gated activations of the feed-forward network."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.arguments import Activation

COLUMNS, NUM_WARPS = 1024, 4
"""A program's: eight elements per thread, one load of 16 bytes of bfloat16 from each half."""


@triton.jit
def _act_and_mul_kernel(x, output, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, IS_GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < WIDTH
    gate = tl.load(x + row * 2 * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * WIDTH + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    if IS_GELU:
        # x / 2 * (1 + tanh(u)) is x * sigmoid(2 u).
        activated = gate * tl.sigmoid(1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate))
    else:
        activated = gate * tl.sigmoid(gate)
    tl.store(output + row * WIDTH + columns, (activated * up).to(output.dtype.element_ty), mask=mask)


def act_and_mul(x: Tensor, activation: Activation, *, columns: int = COLUMNS, num_warps: int = NUM_WARPS) -> Tensor:
    """See `Ops.act_and_mul`.

    Args:
        x: [T, 2 * intermediate], contiguous: gate | up. Not written.
        columns: Of a program, a power of two.

    Returns:
        A new [T, intermediate] of x's dtype.

    Source: arXiv:2002.05202, section 2 (SwiGLU, GEGLU).
    """
    num_tokens, width = x.shape[0], x.shape[1] // 2
    output = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    columns = min(triton.next_power_of_2(width), columns)
    is_gelu = activation is Activation.GELU_TANH
    _act_and_mul_kernel[(num_tokens, triton.cdiv(width, columns))](
        x, output, WIDTH=width, COLUMNS=columns, IS_GELU=is_gelu, num_warps=num_warps
    )
    return output
