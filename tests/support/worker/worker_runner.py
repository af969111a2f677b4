"""A model runner on a small model, and its expected output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from services.worker.drafts.drafter import Drafting
from services.worker.forward.forward_context import ForwardContext, forward_context
from services.worker.forward.kv_cache import KvCache
from services.worker.forward.state_cache import StateCache
from services.worker.models.loader import LoadedModel, load_model
from services.worker.models.registry import CausalLM
from services.worker.ops import load_ops
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.model_runner import Execution, ModelRunner
from tests.support.models.paged_model import attention_metadata

GIB = 1024**3


def load_exact(model_dir: Path) -> LoadedModel:
    """Load the model on the reference backend."""
    return load_model(model_dir, load_ops("reference"), torch.float32, lambda _: None)


def make_runner(
    loaded: LoadedModel,
    *,
    num_blocks: int | None = 64,
    drafting: Drafting | None = None,
    execution: Execution | None = None,
) -> ModelRunner:
    """A runner of an exact model with `num_blocks` KV blocks; None means as many as fit in 1 GiB."""
    size = KvCacheSize(GIB, num_blocks)
    return ModelRunner(loaded, load_ops("reference"), size, drafting=drafting, execution=execution or Execution())


def generate_alone(loaded: LoadedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy completion of `prompt`, with a full prefill for every token and no cache in between."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(_next_token(loaded, token_ids))
    return token_ids[len(prompt) :]


class WrappedModel:
    """Delegates to another model; subclasses override a part of it."""

    def __init__(self, model: CausalLM) -> None:
        self.dtype = model.dtype
        self.kv_cache_spec = model.kv_cache_spec
        self.state_spec = model.state_spec
        self.context_length = model.context_length
        self.logits_width = model.logits_width
        self.mtp = model.mtp
        self.has_long_factors = model.has_long_factors
        self.implementation = model.implementation
        self.code = model.code
        self._model = model

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """See `CausalLM.forward`."""
        return self._model.forward(token_ids, positions)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.compute_logits`."""
        return self._model.compute_logits(hidden)


@torch.inference_mode()
def _next_token(loaded: LoadedModel, token_ids: list[int]) -> int:
    num_tokens = len(token_ids)
    states = StateCache(loaded.model.state_spec, 1) if loaded.model.state_spec.layers else None
    metadata = attention_metadata(
        [[0]],
        [num_tokens],
        [num_tokens],
        block_size=num_tokens,
        is_prefill=True,
        state_slots=None if states is None else torch.zeros(1, dtype=torch.int64),
    )
    cache = KvCache(loaded.model.kv_cache_spec, num_blocks=1, block_size=num_tokens)
    plan = load_ops("reference").plan_attention(metadata, cache)
    with forward_context(ForwardContext(plan, cache, states=states)):
        hidden = loaded.model.forward(torch.tensor(token_ids), torch.arange(num_tokens))
        return int(loaded.model.compute_logits(hidden[-1:]).argmax())
