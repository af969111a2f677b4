"""Log-probabilities in the model's own distribution, in the form of a step's result."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from services.worker.forward.staging import to_device
from services.worker.ops import Ops
from services.worker.step import Int32Column, Logprobs


def token_logprobs(ops: Ops, logits: Tensor, token_ids: Int32Column, indexes: Int32Column, *, num_top: int) -> Logprobs:
    """Log-probabilities of one token per row, and of each row's most likely ones.

    Args:
        logits: [n, vocabulary], float32, the largest of each row finite; not written.
        token_ids: [n].
        indexes: [n], for `Logprobs.indexes`.
        num_top: How many of the most likely tokens follow the row's own; ties go to the lower id.
    """
    drawn = to_device(token_ids.astype(np.int64), logits.device)
    entries, values, ranks = ops.token_logprobs(logits, drawn, num_top)
    counts = np.full(len(token_ids), entries.shape[1], np.int32)
    return Logprobs(
        indexes, ranks.cpu().numpy(), counts, entries.flatten().cpu().numpy(), values.flatten().cpu().numpy()
    )


def join_logprobs(parts: Sequence[Logprobs]) -> Logprobs:
    """Concatenate at least one part."""
    return Logprobs(
        indexes=np.concatenate([part.indexes for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
        counts=np.concatenate([part.counts for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        values=np.concatenate([part.values for part in parts]),
    )
