"""Norms, the activation and the choice of the largest logit: kernels/elementwise.cpp.

Each op is one call, whose arguments are the fields of the C++ structure of its name.
"""

from __future__ import annotations

import ctypes
from struct import Struct

import torch
from torch import Tensor

from services.worker.ops.native.formats import FORMATS
from services.worker.ops.native.results import Results

_rms_norm = Struct("PPP5qdq").pack
_add_rms_norm = Struct("PPP2qdq").pack
_layer_norm = Struct("PPPP3qdq").pack
_silu_and_mul = Struct("PP3q").pack
_greedy_sample = Struct("PPP3q").pack


class NativeElementwise:
    """The section "Elementwise and norm" of `Ops`, and `greedy_sample`."""

    _library: ctypes.CDLL
    _results: Results

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        output = self._results.empty(*x.shape, dtype=x.dtype)
        shape, strides = x.shape, x.stride()
        num_heads, head_stride = (shape[1], strides[1]) if len(shape) == 3 else (1, 0)
        self._library.ls_rms_norm(
            _rms_norm(
                x.data_ptr(),
                weight.data_ptr(),
                output.data_ptr(),
                *(shape[0], num_heads, shape[-1]),
                *(strides[0], head_stride),
                eps,
                FORMATS[x.dtype],
            )
        )
        return output

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        num_tokens, dim = x.shape
        addresses = x.data_ptr(), residual.data_ptr(), weight.data_ptr()
        self._library.ls_add_rms_norm(_add_rms_norm(*addresses, num_tokens, dim, eps, FORMATS[x.dtype]))
        return x

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        output = self._results.empty(*x.shape, dtype=x.dtype)
        self._library.ls_layer_norm(
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

    def silu_and_mul(self, x: Tensor) -> Tensor:
        num_tokens, width = x.shape
        output = self._results.empty(num_tokens, width // 2, dtype=x.dtype)
        addresses = x.data_ptr(), output.data_ptr()
        self._library.ls_silu_and_mul(_silu_and_mul(*addresses, num_tokens, width // 2, FORMATS[x.dtype]))
        return output

    def greedy_sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        num_rows = len(logits)
        token_ids, largest = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
        self._library.ls_greedy_sample(
            _greedy_sample(logits.data_ptr(), token_ids.data_ptr(), largest.data_ptr(), *logits.shape, logits.stride(0))
        )
        return token_ids, largest
