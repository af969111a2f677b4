"""Converts log-probabilities to and from a cell's internal messages, those of steps and those of `Exchange`."""

from __future__ import annotations

import numpy as np

from lockstep.internal.v1 import sampling_pb2
from shared.request.limits import TOKEN_DTYPE
from shared.step.logprobs import Logprobs

_FLOAT_DTYPE = np.dtype("<f4")


def encode_logprobs(logprobs: Logprobs) -> sampling_pb2.Logprobs:
    """Encode log-probabilities."""
    requested = logprobs.requested_counts
    return sampling_pb2.Logprobs(
        indexes=logprobs.indexes.astype(TOKEN_DTYPE, copy=False).tobytes(),
        ranks=logprobs.ranks.astype(TOKEN_DTYPE, copy=False).tobytes(),
        counts=logprobs.counts.astype(TOKEN_DTYPE, copy=False).tobytes(),
        token_ids=logprobs.token_ids.astype(TOKEN_DTYPE, copy=False).tobytes(),
        values=logprobs.values.astype(_FLOAT_DTYPE, copy=False).tobytes(),
        requested_counts=b"" if requested is None else requested.astype(TOKEN_DTYPE, copy=False).tobytes(),
    )


def decode_logprobs(message: sampling_pb2.Logprobs) -> Logprobs:
    """Decode log-probabilities, without checking whether columns fit each other.

    Raises:
        ValueError: a column's size is not a multiple of its dtype's.
    """
    return Logprobs(
        indexes=np.frombuffer(message.indexes, TOKEN_DTYPE),
        ranks=np.frombuffer(message.ranks, TOKEN_DTYPE),
        counts=np.frombuffer(message.counts, TOKEN_DTYPE),
        token_ids=np.frombuffer(message.token_ids, TOKEN_DTYPE),
        values=np.frombuffer(message.values, _FLOAT_DTYPE),
        requested_counts=np.frombuffer(message.requested_counts, TOKEN_DTYPE) if message.requested_counts else None,
    )
