"""Prompt log-probabilities: each token's hidden state gives those of the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.batch.step_input import ScoredChunk
from services.worker.forward.staging import to_device
from services.worker.ops import Ops
from services.worker.sampling.logprobs import ScoreTensors, join_scores
from shared.step.columns import Int32Column

# Bounds the logits in memory: 128 rows for a vocabulary of 128k are 64 MiB.
_MAX_ROWS = 128


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of a prompt's chunk, on the device."""

    slot: int
    indexes: Int32Column
    """[n], positions in the prompt."""
    scores: ScoreTensors


class PromptScorer:
    """Scores prompts chunk by chunk, each token but the first exactly once.

    Invariant: while a prompt is incomplete, its last token's hidden state is kept, by slot. The next prompt that begins
    there drops one left over.
    """

    def __init__(self, ops: Ops, compute_logits: Callable[[Tensor], Tensor]) -> None:
        """`compute_logits` maps hidden states [n, hidden] to logits [n, vocabulary] float32."""
        self._ops = ops
        self._compute_logits = compute_logits
        self._slot_to_last_hidden: dict[int, Tensor] = {}

    def score(
        self, chunks: Sequence[ScoredChunk], token_ids: npt.NDArray[np.int64], hidden: Tensor
    ) -> tuple[PromptScores, ...]:
        """Score a step's chunks, which are from different slots.

        Args:
            token_ids: [num_tokens].
            hidden: [num_tokens, hidden].

        Returns:
            Scores of each chunk, except for one with only a prompt's first token.
        """
        scores = (self._score_chunk(chunk, token_ids, hidden) for chunk in chunks)
        return tuple(each for each in scores if each is not None)

    def _score_chunk(self, chunk: ScoredChunk, token_ids: npt.NDArray[np.int64], hidden: Tensor) -> PromptScores | None:
        end = chunk.first_token + chunk.num_tokens
        targets = token_ids[chunk.first_token : end]
        states = hidden[chunk.first_token : end - 1]
        before = self._slot_to_last_hidden.pop(chunk.slot, None)
        if chunk.position == 0:
            targets = targets[1:]
        else:
            assert before is not None, "the prompt's previous chunk was not scored"
            states = torch.cat((before, states))
        if chunk.position + chunk.num_tokens < chunk.num_prompt_tokens:
            # A copy: a view would keep all of the step's hidden states alive.
            self._slot_to_last_hidden[chunk.slot] = hidden[end - 1 : end].clone()
        if not len(targets):
            return None
        first = chunk.position + chunk.num_tokens - len(targets)
        targets_there = to_device(targets[:, None], hidden.device)
        parts = []
        for start in range(0, len(targets), _MAX_ROWS):
            rows = slice(start, start + _MAX_ROWS)
            logits = self._compute_logits(states[rows])
            parts.append(self._ops.token_logprobs(logits, targets_there[rows], chunk.num_top))
        indexes = np.arange(first, first + len(targets), dtype=np.int32)
        return PromptScores(chunk.slot, indexes, join_scores(parts))
