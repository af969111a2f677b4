"""Recurrent layers: kernels/recurrent.cpp and delta_rule.cpp.

Each op is one call, whose arguments are its C++ structure's fields.
"""

from __future__ import annotations

from struct import Struct

from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata
from services.worker.ops import recurrent
from services.worker.ops.arguments import DeltaGates
from services.worker.ops.native.formats import FORMATS
from services.worker.ops.native.state import NativeState

_causal_conv = Struct("6P3q2qq").pack
_delta_rule = Struct("8P5q3q2q").pack
_gated_norm = Struct("4P3qqdq").pack
_mul_sigmoid = Struct("2P2q2qq").pack
# kernels/recurrent.cpp's limit.
_MAX_TAPS = 4


def causal_conv(native: NativeState, x: Tensor, weight: Tensor, state: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Convolve in one pass; torch does what adds up more values than the kernel can."""
    num_taps, num_channels = weight.shape
    if num_taps > _MAX_TAPS:
        return recurrent.causal_conv(x, weight, state, metadata)
    output = native.results.empty(len(x), num_channels, dtype=x.dtype)
    native.library.ls_causal_conv(
        _causal_conv(
            *(x.data_ptr(), weight.data_ptr(), state.data_ptr(), output.data_ptr()),
            *_sequences(metadata),
            *(len(metadata.query_lens), num_channels, num_taps),
            *(x.stride(0), state.stride(0)),
            FORMATS[x.dtype],
        )
    )
    return output


def gated_delta_rule(
    native: NativeState, qkv: Tensor, gates: Tensor, params: DeltaGates, state: Tensor, metadata: AttentionMetadata
) -> Tensor:
    """Walk the tokens of each head of each sequence."""
    _, num_heads, key_dim, value_dim = state.shape
    num_key_heads = (qkv.shape[1] - num_heads * value_dim) // (2 * key_dim)
    output = native.results.empty(len(qkv), num_heads, value_dim, dtype=qkv.dtype)
    native.library.ls_delta_rule(
        _delta_rule(
            *(qkv.data_ptr(), gates.data_ptr(), params.decay.data_ptr(), params.bias.data_ptr()),
            *(state.data_ptr(), output.data_ptr()),
            *_sequences(metadata),
            *(len(metadata.query_lens), num_key_heads, num_heads, key_dim, value_dim),
            *(qkv.stride(0), gates.stride(0), state.stride(0)),
            *(params.is_tiled, FORMATS[qkv.dtype]),
        )
    )
    return output


def gated_rms_norm(native: NativeState, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise and multiply in one pass."""
    output = native.results.empty(*x.shape, dtype=x.dtype)
    addresses = x.data_ptr(), gate.data_ptr(), weight.data_ptr(), output.data_ptr()
    native.library.ls_gated_norm(_gated_norm(*addresses, *x.shape, gate.stride(0), eps, FORMATS[x.dtype]))
    return output


def mul_sigmoid(native: NativeState, x: Tensor, gate: Tensor) -> Tensor:
    """Multiply in place."""
    addresses = x.data_ptr(), gate.data_ptr()
    native.library.ls_mul_sigmoid(_mul_sigmoid(*addresses, *x.shape, gate.shape[1], gate.stride(0), FORMATS[x.dtype]))
    return x


def _sequences(metadata: AttentionMetadata) -> tuple[int, int]:
    assert metadata.state_slots is not None, "the model has states"
    return metadata.state_slots.data_ptr(), metadata.cu_seqlens_q.data_ptr()
