"""Norms, activations, a factor, a choice of columns and that of the largest logit: kernels/elementwise.cpp.

Each op is one call, whose arguments are the fields of the C++ structure of its name.
"""

from __future__ import annotations

from struct import Struct

import torch
from torch import Tensor

from services.worker.ops.arguments import Activation
from services.worker.ops.native.formats import FORMATS
from services.worker.ops.native.state import NativeState

_rms_norm = Struct("PPP5qd2q").pack
_add_rms_norm = Struct("PPP2qd2q").pack
_layer_norm = Struct("PPPP3qdq").pack
_act_and_mul = Struct("PP4q").pack
_scale = Struct("P2qdq").pack
_take_columns = Struct("PPP4q").pack
_greedy_sample = Struct("PPP3q").pack

# kernels/elementwise.cpp's numbers.
_ACTIVATIONS = {Activation.SILU: 0, Activation.GELU_TANH: 1}


def rms_norm(native: NativeState, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise rows, or heads of rows, of any stride."""
    output = native.results.empty(*x.shape, dtype=x.dtype)
    shape, strides = x.shape, x.stride()
    num_heads, head_stride = (shape[1], strides[1]) if len(shape) == 3 else (1, 0)
    native.library.ls_rms_norm(
        _rms_norm(
            x.data_ptr(),
            weight.data_ptr(),
            output.data_ptr(),
            *(shape[0], num_heads, shape[-1]),
            *(strides[0], head_stride),
            eps,
            FORMATS[x.dtype],
            FORMATS[weight.dtype],
        )
    )
    return output


def add_rms_norm(native: NativeState, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add and normalise in one pass; the result is in the memory of `x`."""
    num_tokens, dim = x.shape
    addresses = x.data_ptr(), residual.data_ptr(), weight.data_ptr()
    formats = FORMATS[x.dtype], FORMATS[weight.dtype]
    native.library.ls_add_rms_norm(_add_rms_norm(*addresses, num_tokens, dim, eps, *formats))
    return x


def layer_norm(native: NativeState, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise rows of any stride."""
    output = native.results.empty(*x.shape, dtype=x.dtype)
    native.library.ls_layer_norm(
        _layer_norm(
            x.data_ptr(),
            weight.data_ptr(),
            bias.data_ptr(),
            output.data_ptr(),
            *x.shape,
            x.stride(0),
            eps,
            FORMATS[x.dtype],
        )
    )
    return output


def act_and_mul(native: NativeState, x: Tensor, activation: Activation) -> Tensor:
    """Activate and multiply in one pass."""
    num_tokens, width = x.shape
    output = native.results.empty(num_tokens, width // 2, dtype=x.dtype)
    addresses = x.data_ptr(), output.data_ptr()
    native.library.ls_act_and_mul(
        _act_and_mul(*addresses, num_tokens, width // 2, _ACTIVATIONS[activation], FORMATS[x.dtype])
    )
    return output


def scale(native: NativeState, x: Tensor, factor: float) -> Tensor:
    """Multiply in place."""
    native.library.ls_scale(_scale(x.data_ptr(), *x.shape, factor, FORMATS[x.dtype]))
    return x


def take_columns(native: NativeState, x: Tensor, columns: Tensor) -> Tensor:
    """`x[:, columns]` in a new tensor.

    Args:
        x: [T, N], of any strides.
        columns: [M] int64, contiguous, each in [0, N).
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    output = native.results.empty(len(x), len(columns), dtype=x.dtype)
    addresses = x.data_ptr(), columns.data_ptr(), output.data_ptr()
    native.library.ls_take_columns(_take_columns(*addresses, *output.shape, x.stride(0), FORMATS[x.dtype]))
    return output


def greedy_sample(native: NativeState, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Take the largest of rows of any stride."""
    num_rows = len(logits)
    token_ids, largest = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
    native.library.ls_greedy_sample(
        _greedy_sample(logits.data_ptr(), token_ids.data_ptr(), largest.data_ptr(), *logits.shape, logits.stride(0))
    )
    return token_ids, largest
