"""Token embeddings and the projection onto the vocabulary, split over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from services.worker.layers.shard import Part
from services.worker.ops import EmbeddingKernel, LinearKernel
from services.worker.parallel.communicator import Communicator


class Embedding:
    """One vector per token id."""

    def __init__(self, kernel: EmbeddingKernel, part: Part, tp: Communicator) -> None:
        """`kernel` has the vectors of `part`'s ids, in their order."""
        self._kernel = kernel
        self._part = part
        self._tp = tp

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] int64 to a new [T, hidden], the same on all ranks."""
        if self._tp.size == 1:
            return self._kernel(token_ids)
        places = token_ids - self._part.start
        is_elsewhere = (places < 0) | (places >= len(self._part))
        vectors = self._kernel(places.masked_fill_(is_elsewhere, 0))
        # Exactly one rank has each token's vector; the others add zeros.
        return self._tp.all_reduce(vectors.masked_fill_(is_elsewhere.unsqueeze(1), 0.0))


class Head:
    """The projection onto the vocabulary."""

    def __init__(self, kernel: LinearKernel, parts: Sequence[Part], tp: Communicator) -> None:
        """`kernel` projects onto this rank's part; `parts` are all ranks'."""
        self._kernel = kernel
        self._sizes = tuple(len(part) for part in parts)
        self._tp = tp

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, hidden] to a new [T, vocabulary], the same on all ranks; see `Ops.prepare_head` for its dtype."""
        return self._tp.all_gather(self._kernel(hidden), self._sizes)
