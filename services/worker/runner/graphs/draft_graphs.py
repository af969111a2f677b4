"""Captured decode steps with drafts: every sequence is padded to the most tokens that one may have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from services.worker.batch.enter_checks import BatchLimits
from services.worker.batch.step_input import StepInput, StepTokens
from services.worker.drafts.drafted_states import DraftedRows
from services.worker.forward.forward_context import AttentionMetadata, DpMetadata, forward_context
from services.worker.forward.staging import HostArrays
from services.worker.forward.state_cache import spare_slots
from services.worker.runner.graphs.graph_runner import (
    GraphSettings,
    Replays,
    StepFunctions,
    decode_metadata,
    needed_sizes,
    size_for,
)
from shared.step.columns import Int32Column


class DraftGraphs:
    """Replays decode steps of k drafts per sequence and a token before them, padded to a captured batch size.

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
        """Capture a graph for each batch size within `limits`, if there is one; see `DecodeGraphs`.

        Args:
            num_draft_tokens: k, at least 1.

        Raises:
            NotRepeatableError: the model's decode steps cannot be captured.
        """
        self._functions = functions
        self._limits = limits
        self._num_tokens = num_tokens = num_draft_tokens + 1
        self._is_recorded = settings.capture.is_recorded
        most = limits.max_num_batched_tokens // num_tokens
        self.sizes = tuple(size for size in needed_sizes(settings.batch_sizes, limits.max_num_seqs) if size <= most)
        size = max(self.sizes, default=0)
        # Padding may begin where a context ends.
        num_blocks = -(-(limits.context_length + num_draft_tokens) // limits.block_size)
        self._token_ids = torch.zeros(size * num_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._token_ids)
        self._slot_mapping = torch.full_like(self._token_ids, -1)
        self._context_lens = torch.full((size,), num_tokens, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(size, num_blocks, dtype=torch.int32, device=device)
        self._cu_seqlens_q = torch.arange(size + 1, dtype=torch.int32, device=device) * num_tokens
        self._state_slots = None if functions.states is None else spare_slots(functions.states.cache, size)
        self._replays = Replays(settings.capture, self.sizes, self._forward)

    def size_for(self, num_seqs: int) -> int | None:
        """The smallest captured batch size that holds so many sequences; None if it is too large for all."""
        return size_for(self.sizes, num_seqs)

    def pad(self, step_input: StepInput, tokens: StepTokens, size: int) -> HostArrays:
        """The inputs of a decode for the graph of this size, and where the step's own tokens are in them."""
        lengths = step_input.query_lens.astype(np.int64)
        num_seqs, num_tokens = len(lengths), self._num_tokens
        starts = self.first_tokens(num_seqs)
        places = np.arange(step_input.num_tokens) + np.repeat(starts - step_input.cu_seqlens_q[:-1], lengths)
        token_ids = np.zeros(size * num_tokens, np.int64)
        token_ids[places] = tokens.token_ids
        slot_mapping = np.full(size * num_tokens, -1, np.int64)
        slot_mapping[places] = tokens.slot_mapping
        positions = np.zeros((size, num_tokens), np.int64)
        positions[:num_seqs] = tokens.positions[step_input.cu_seqlens_q[:-1], None] + np.arange(num_tokens)
        context_lens = np.full(size, num_tokens, np.int32)
        context_lens[:num_seqs] = step_input.context_lens + (num_tokens - step_input.query_lens)
        arrays = {
            "padded_token_ids": token_ids,
            # Tables of rotations end with the context.
            "padded_positions": positions.clip(max=self._limits.context_length - 1).ravel(),
            "padded_slot_mapping": slot_mapping,
            "padded_context_lens": context_lens,
            "padded_block_tables": tokens.block_tables,
            "padded_places": places,
        }
        if self._functions.states is not None:
            state_slots = np.full(size, self._functions.states.cache.spare_slot, np.int64)
            state_slots[:num_seqs] = step_input.slots
            arrays["padded_state_slots"] = state_slots
        return arrays

    def first_tokens(self, num_seqs: int) -> Int32Column:
        """[num_seqs], the first token of each sequence among those of a graph."""
        return np.arange(num_seqs, dtype=np.int32) * np.int32(self._num_tokens)

    def replay(self, size: int, arrays: dict[str, Tensor]) -> Tensor:
        """Compute the decode of `pad`: hidden states [num_tokens, hidden] of its own tokens."""
        num_tokens = size * self._num_tokens
        self._token_ids[:num_tokens].copy_(arrays["padded_token_ids"])
        self._positions[:num_tokens].copy_(arrays["padded_positions"])
        self._slot_mapping[:num_tokens].copy_(arrays["padded_slot_mapping"])
        self._context_lens[:size].copy_(arrays["padded_context_lens"])
        tables = arrays["padded_block_tables"]
        self._block_tables[: len(tables), : tables.shape[1]].copy_(tables)
        if self._state_slots is not None:
            self._state_slots[:size].copy_(arrays["padded_state_slots"])
        return self._replays(size)[arrays["padded_places"]]

    def _forward(self, size: int) -> Tensor:
        num_tokens = size * self._num_tokens
        metadata, states = self._metadata(size), self._functions.states
        context = self._functions.make_context(metadata, DpMetadata((), num_tokens))
        if states is not None and states.drafted is not None:
            context = replace(context, drafted=states.drafted.of_pass(DraftedRows.split(metadata, size)))
        with forward_context(context):
            return self._functions.forward(self._token_ids[:num_tokens], self._positions[:num_tokens])

    def _metadata(self, size: int) -> AttentionMetadata:
        """Padding may begin where a context ends, so the longest is longer than that."""
        longest = self._limits.context_length + self._num_tokens - 1 if self._is_recorded else None
        metadata = decode_metadata(
            self._slot_mapping[: size * self._num_tokens],
            self._block_tables[:size],
            self._context_lens[:size],
            self._cu_seqlens_q[: size + 1],
            longest=longest,
        )
        return replace(metadata, state_slots=None if self._state_slots is None else self._state_slots[:size])
