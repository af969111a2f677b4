"""The logits of multi-token prediction (MTP) layers for a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.worker.forward.forward_context import ForwardContext, forward_context
from services.worker.models.protocol import CausalLM, MtpLayers
from tests.support.models.paged_model import PagedModel, attention_metadata

# Maps a chunk's slice of the sequence and its positions to one row per token.
Compute = Callable[[slice, Tensor], Tensor]


def mtp_of(model: CausalLM) -> MtpLayers:
    """The MTP layers of a model, which must have them."""
    assert model.mtp is not None
    return model.mtp


@torch.inference_mode()
def our_mtp_logits(paged: PagedModel, token_ids: Sequence[int], chunk_size: int) -> list[Tensor]:
    """The logits after each token, per layer; everything is computed in chunks of `chunk_size` tokens."""
    model, mtp, sequence = paged.model, mtp_of(paged.model), paged.add(token_ids)
    table, state_slots = sequence.block_table, paged.state_slots([sequence])
    tokens = torch.tensor(token_ids)

    def in_chunks(num_tokens: int, compute: Compute) -> Tensor:
        parts = []
        for start in range(0, num_tokens, chunk_size):
            end, is_prefill = min(start + chunk_size, num_tokens), chunk_size > 1
            metadata = attention_metadata(
                *([table], [end - start], [end]),
                block_size=paged.kv_cache.block_size,
                is_prefill=is_prefill,
                state_slots=state_slots,
            )
            plan = paged.ops.plan_attention(metadata, paged.kv_cache)
            context = ForwardContext(plan, paged.kv_cache, states=paged.states)
            with forward_context(context):
                parts.append(compute(slice(start, end), torch.arange(start, end)))
        return torch.cat(parts)

    def layer_states(layer: int, before: Tensor) -> Tensor:
        following = tokens[layer + 1 :]
        return in_chunks(len(following), lambda part, places: mtp.forward(before[part], following[part], places, layer))

    states = in_chunks(len(tokens), lambda part, places: model.forward(tokens[part], places))
    logits = []
    for layer in range(mtp.num_layers):
        states = layer_states(layer, states)
        logits.append(mtp.compute_logits(states))
    return logits
