"""A model runner on a small model, and what it must compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from services.worker.forward_context import AttentionMetadata, ForwardContext, forward_context
from services.worker.kv_cache import KvCache
from services.worker.loader import LoadedModel, load_model
from services.worker.model_runner import KvCacheSize, ModelRunner
from services.worker.ops import load_ops

GIB = 1024**3


def load_exact(model_dir: Path) -> LoadedModel:
    """The model on the reference backend."""
    return load_model(model_dir, load_ops("reference"), torch.float32, lambda _: None)


def make_runner(loaded: LoadedModel, *, num_blocks: int | None = 64) -> ModelRunner:
    """A runner of an exact model whose pool has `num_blocks`, or what 1 GiB holds."""
    return ModelRunner(loaded, load_ops("reference"), KvCacheSize(GIB, num_blocks))


def generate_alone(loaded: LoadedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy completion of `prompt`: every token from a prefill of all before it, nothing kept between them."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(_next_token(loaded, token_ids))
    return token_ids[len(prompt) :]


@torch.inference_mode()
def _next_token(loaded: LoadedModel, token_ids: list[int]) -> int:
    num_tokens = len(token_ids)
    positions = torch.arange(num_tokens)
    attention = AttentionMetadata(
        is_prefill=True,
        slot_mapping=positions,
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32),
        query_lens=(num_tokens,),
        context_lens_host=(num_tokens,),
        max_query_len=num_tokens,
        max_context_len=num_tokens,
    )
    cache = KvCache(loaded.model.kv_cache_spec, num_blocks=1, block_size=num_tokens)
    with forward_context(ForwardContext.for_step(load_ops("reference"), attention, cache)):
        hidden = loaded.model.forward(torch.tensor(token_ids), positions)
        return int(loaded.model.compute_logits(hidden[-1:]).argmax())
