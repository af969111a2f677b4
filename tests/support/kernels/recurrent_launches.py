"""Launches of recurrent layers with the sizes of Qwen3-Next, on the meta device."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata
from services.worker.ops.arguments import DeltaGates
from services.worker.ops.triton.recurrent import exact_causal_conv, exact_delta_rule, gated_rms_norm, mul_sigmoid

_NUM_KEY_HEADS, _NUM_HEADS, _HEAD_DIM, _TAPS = 16, 32, 128, 4
_WIDTH = (2 * _NUM_KEY_HEADS + _NUM_HEADS) * _HEAD_DIM
_NUM_SLOTS, _HIDDEN, _NUM_QUERY_HEADS, _QUERY_DIM = 64, 2048, 16, 256


def launch_recurrent_layers(query_lens: tuple[int, ...], *, offset: int = 0) -> None:
    """The launches of a step; its columns begin at `offset` in longer ones."""
    num_seqs, num_tokens, values = len(query_lens), sum(query_lens), _NUM_HEADS * _HEAD_DIM
    metadata = AttentionMetadata(
        is_prefill=max(query_lens) > 1,
        slot_mapping=_of_type(torch.int64, num_tokens),
        block_tables=_of_type(torch.int32, num_seqs, 8),
        context_lens=_of_type(torch.int32, num_seqs),
        cu_seqlens_q=_of_type(torch.int32, offset + num_seqs + 1)[offset:],
        query_lens=query_lens,
        context_lens_host=query_lens,
        max_query_len=max(query_lens),
        max_context_len=max(query_lens),
        state_slots=_of_type(torch.int64, offset + num_seqs)[offset:],
    )
    qkvz = _of_type(torch.bfloat16, num_tokens, _WIDTH + values)
    # A slot has all layers' tensors side by side.
    conv_state = _of_type(torch.bfloat16, _NUM_SLOTS, 36, _TAPS - 1, _WIDTH)[:, 3]
    state = _of_type(torch.float32, _NUM_SLOTS, 36, _NUM_HEADS, _HEAD_DIM, _HEAD_DIM)[:, 3]
    heads = _of_type(torch.float32, _NUM_HEADS)
    weight = _of_type(torch.bfloat16, _TAPS, _WIDTH)
    mixed = exact_causal_conv(qkvz[:, :_WIDTH], weight, conv_state, metadata)
    gates = _of_type(torch.bfloat16, num_tokens, 2 * _NUM_HEADS)
    read = exact_delta_rule(mixed, gates, DeltaGates(heads, heads), state, metadata)
    gated_rms_norm(read, qkvz[:, _WIDTH:].view(read.shape), _of_type(torch.bfloat16, _HEAD_DIM), 1e-6)
    attended = _of_type(torch.bfloat16, num_tokens, _NUM_QUERY_HEADS * _QUERY_DIM)
    mul_sigmoid(attended, _of_type(torch.bfloat16, num_tokens, _NUM_QUERY_HEADS * _QUERY_DIM))
    mul_sigmoid(_of_type(torch.bfloat16, num_tokens, _HIDDEN), _of_type(torch.bfloat16, num_tokens, 1))


def _of_type(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
