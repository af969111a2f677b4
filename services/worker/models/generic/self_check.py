"""Whether sequences that share a step leave each other alone, tried on random weights before a model's own are read.

For classes that no test covers: the rules and the dry run do not see everything that mixes rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata, ForwardContext, forward_context
from services.worker.forward.kv_cache import KvCache
from services.worker.models.generic.dry_run import UnservableError
from services.worker.models.generic.model import GenericModel
from services.worker.ops import Ops

_BLOCK_SIZE = 16
_LENGTHS = (7, 21, 12)
# The tokens of the second sequence's first chunk.
_CHUNK = 9
# Relative to the largest logit: far above what rounding does, far below another sequence's influence.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.05}


def check_alone(model: GenericModel, ops: Ops, device: torch.device) -> None:
    """Compute three sequences alone, and again together: in chunks beside each other, then one more token of each.

    Raises:
        UnservableError: the logits differ, or are not finite.
    """
    num_tokens = sum(_LENGTHS)
    every = torch.arange(num_tokens, device=device) * 7919 % model.logits_width
    prompts = torch.split(every, list(_LENGTHS))
    alone = torch.stack([_Sequences(model, ops, [prompt]).run([len(prompt)], is_prefill=True)[0] for prompt in prompts])
    together = _Sequences(model, ops, prompts)
    together.run([_LENGTHS[0] - 1, _CHUNK, 0], is_prefill=True)
    together.run([0, _LENGTHS[1] - _CHUNK - 1, _LENGTHS[2] - 1], is_prefill=True)
    packed = together.run([1, 1, 1], is_prefill=False)
    largest = float(alone.abs().max())
    difference = float((alone - packed).abs().max())
    if not difference <= _TOLERANCES.get(model.dtype, 0.05) * max(largest, 1e-3):
        raise UnservableError(
            f"sequences that share a step change each other's logits, by {difference:.3g} of {largest:.3g}"
        )


class _Sequences:
    """Sequences with blocks of their own in a cache of their own."""

    def __init__(self, model: GenericModel, ops: Ops, prompts: Sequence[Tensor]) -> None:
        self._model = model
        self._ops = ops
        self._prompts = prompts
        self._done = [0] * len(prompts)
        self._width = max(-(-len(prompt) // _BLOCK_SIZE) for prompt in prompts)
        device = prompts[0].device
        # Block 0 is nobody's, as padding reads it.
        self._cache = KvCache(model.kv_cache_spec, 1 + self._width * len(prompts), _BLOCK_SIZE, device)

    def run(self, counts: Sequence[int], *, is_prefill: bool) -> Tensor:
        """Compute the next `counts[i]` tokens of each sequence; the last logits of those that have any."""
        chosen = [index for index, count in enumerate(counts) if count]
        runs = [range(self._done[index], self._done[index] + counts[index]) for index in chosen]
        for index in chosen:
            self._done[index] += counts[index]
        tables = [[1 + index * self._width + block for block in range(self._width)] for index in chosen]
        metadata = self._metadata(runs, tables, is_prefill=is_prefill)
        token_ids = torch.cat([self._prompts[i][run.start : run.stop] for i, run in zip(chosen, runs, strict=True)])
        positions = torch.tensor([place for run in runs for place in run], device=token_ids.device)
        with forward_context(ForwardContext(self._ops.plan_attention(metadata, self._cache), self._cache)):
            hidden = self._model.forward(token_ids, positions)
        return self._model.compute_logits(hidden[metadata.cu_seqlens_q[1:].long() - 1])

    def _metadata(
        self, runs: Sequence[range], tables: Sequence[Sequence[int]], *, is_prefill: bool
    ) -> AttentionMetadata:
        device = self._prompts[0].device
        lengths, ends = [len(run) for run in runs], [run.stop for run in runs]
        slots = [
            table[place // _BLOCK_SIZE] * _BLOCK_SIZE + place % _BLOCK_SIZE
            for run, table in zip(runs, tables, strict=True)
            for place in run
        ]
        starts = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        return AttentionMetadata(
            is_prefill=is_prefill,
            slot_mapping=torch.tensor(slots, device=device),
            block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
            context_lens=torch.tensor(ends, dtype=torch.int32, device=device),
            cu_seqlens_q=starts,
            query_lens=tuple(lengths),
            context_lens_host=tuple(ends),
            max_query_len=max(lengths),
            max_context_len=max(ends),
        )
