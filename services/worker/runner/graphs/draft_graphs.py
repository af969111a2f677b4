"""Captured decode steps with drafts: every sequence is padded to the most tokens that one may have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from services.worker.batch.enter_checks import BatchLimits
from services.worker.batch.step_input import StepInput
from services.worker.drafts.drafted_states import DraftedRows
from services.worker.forward.forward_context import ForwardContext
from services.worker.forward.staging import HostArrays
from services.worker.layout import RankLayout
from services.worker.runner.graphs.graph_runner import (
    GraphSettings,
    PaddedGraphs,
    PaddedInputs,
    StepFunctions,
    needed_sizes,
)


class DraftGraphs(PaddedGraphs):
    """Replays decode steps of k drafts per sequence and a token before them.

    A sequence with one draft, where k is 3:

        token_ids       t  d0   0   0
        slot_mapping    s0 s1  -1  -1     padding is not stored
        context_len     its length with d0, and 2 more: each token sees what it sees without padding

    Padded tokens read what their sequence's blocks hold, or other blocks; their results are garbage, and reach no
    other token.
    """

    def __init__(
        self,
        functions: StepFunctions,
        limits: BatchLimits,
        settings: GraphSettings,
        *,
        num_draft_tokens: int,
        device: torch.device,
    ) -> None:
        """Capture a graph for each batch size within `limits`, if there is one. Raises as `PaddedGraphs`.

        `num_draft_tokens` is k, at least 1.
        """
        self._context_length = limits.context_length
        num_tokens = num_draft_tokens + 1
        most = limits.max_num_batched_tokens // num_tokens
        sizes = [size for size in needed_sizes(settings.batch_sizes, limits.max_num_seqs) if size <= most]
        size = max(sizes, default=0)
        # Padding may begin where a context ends.
        longest = limits.context_length + num_draft_tokens
        token_ids = torch.zeros(size * num_tokens, dtype=torch.int64, device=device)
        inputs = PaddedInputs(
            token_ids=token_ids,
            positions=torch.zeros_like(token_ids),
            slot_mapping=torch.full_like(token_ids, -1),
            context_lens=torch.full((size,), num_tokens, dtype=torch.int32, device=device),
            block_tables=torch.zeros(size, -(-longest // limits.block_size), dtype=torch.int32, device=device),
        )
        # Coupled ranks draft nothing.
        super().__init__(functions, settings, RankLayout(), sizes=sizes, inputs=inputs, longest=longest)

    def pad(self, step_input: StepInput, size: int) -> HostArrays:
        """The arrays of a decode, with the inputs of the graph of this size.

        `padded_places` [num_tokens] int64 are where the step's own tokens are in these.
        """
        arrays = step_input.arrays
        lengths = step_input.query_lens.astype(np.int64)
        num_seqs, num_tokens = len(lengths), self._num_tokens
        starts = np.arange(num_seqs, dtype=np.int32) * np.int32(num_tokens)
        places = np.arange(step_input.num_tokens) + np.repeat(starts - step_input.cu_seqlens_q[:-1], lengths)
        token_ids = np.zeros(size * num_tokens, np.int64)
        token_ids[places] = arrays["token_ids"]
        slot_mapping = np.full(size * num_tokens, -1, np.int64)
        slot_mapping[places] = arrays["slot_mapping"]
        positions = np.zeros((size, num_tokens), np.int64)
        positions[:num_seqs] = arrays["positions"][step_input.cu_seqlens_q[:-1], None] + np.arange(num_tokens)
        context_lens = np.full(size, num_tokens, np.int32)
        context_lens[:num_seqs] = step_input.context_lens + (num_tokens - step_input.query_lens)
        padded = {
            "token_ids": token_ids,
            # Tables of rotations end with the context.
            "positions": positions.clip(max=self._context_length - 1).ravel(),
            "slot_mapping": slot_mapping,
            "context_lens": context_lens,
            "padded_places": places,
        }
        if "drafted_tokens" in arrays:
            padded["drafted_tokens"] = places[arrays["drafted_tokens"]]
        return arrays | padded

    @property
    def row_width(self) -> int:
        """Tokens of each sequence, padding included."""
        return self._num_tokens

    def replay_padded(self, size: int, arrays: dict[str, Tensor]) -> Tensor:
        """Compute the decode of `pad`: hidden states [num_tokens, hidden] of its own tokens."""
        num_tokens, inputs = size * self._num_tokens, self._inputs
        inputs.token_ids[:num_tokens].copy_(arrays["token_ids"])
        inputs.positions[:num_tokens].copy_(arrays["positions"])
        inputs.slot_mapping[:num_tokens].copy_(arrays["slot_mapping"])
        inputs.context_lens[:size].copy_(arrays["context_lens"])
        tables = arrays["block_tables"]
        inputs.block_tables[: len(tables), : tables.shape[1]].copy_(tables)
        places = arrays["padded_places"]
        return self.replay(size, arrays.get("state_slots", places[:0]))[places]

    @override
    def _in_context(self, context: ForwardContext) -> ForwardContext:
        states, attention = self._functions.states, context.plan.metadata
        if states is None or states.drafted is None:
            return context
        return replace(context, drafted=states.drafted.of_pass(DraftedRows.split(attention, len(attention.query_lens))))
