"""Which part of each dimension a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.worker.layers.context_limit import NO_LIMIT, ContextLimit
from services.worker.layers.expert_parallel import nth_run
from services.worker.ops import Ops
from services.worker.parallel.communicator import SINGLE, Communicator, Parallel
from services.worker.weights.model_weights import ModelWeights
from shared.model_files.model_dir import ModelDirectoryError


@dataclass(frozen=True, slots=True)
class Part:
    """The run [start, stop) of a dimension of size `total`, in its own unit, such as heads or columns."""

    total: int
    start: int
    stop: int

    @classmethod
    def whole(cls, total: int) -> Part:
        """All of a dimension."""
        return cls(total, 0, total)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def run(self) -> slice:
        """The run as a slice."""
        return slice(self.start, self.stop)

    def times(self, width: int) -> Part:
        """The same part in a finer unit, `width` of which make up one of its units."""
        return Part(self.total * width, self.start * width, self.stop * width)


@dataclass(frozen=True, slots=True)
class Shard:
    """What a rank builds its layers from."""

    ops: Ops
    weights: ModelWeights
    parallel: Parallel = SINGLE
    requested_kv_dtype: torch.dtype | None = None
    """What keys and values are stored in; None leaves it to the model."""
    context: ContextLimit = NO_LIMIT
    """What bounds the context served."""
    has_head: bool = True
    """Whether the model has a head, or its hidden states are the result."""

    @property
    def tp(self) -> Communicator:
        """The ranks that a layer is split over."""
        return self.parallel.tp

    @property
    def kv_dtype(self) -> torch.dtype:
        """What keys and values are stored in."""
        return self.weights.dtype if self.requested_kv_dtype is None else self.requested_kv_dtype

    def parts(self, name: str, total: int) -> list[Part]:
        """Each rank's part of a dimension; any remainder goes to the first ranks.

        Raises:
            ModelDirectoryError: `total` is less than the number of ranks; the message has `name`, as in config.json.
        """
        size = self.tp.size
        if total < size:
            raise ModelDirectoryError(f"config.json: {name} {total} cannot be split over {size} tensor-parallel ranks")
        runs = [nth_run(total, rank, size) for rank in range(size)]
        return [Part(total, run.start, run.stop) for run in runs]

    def part(self, name: str, total: int) -> Part:
        """This rank's part; see `parts`."""
        return self.parts(name, total)[self.tp.rank]

    def heads(self, num_heads: int) -> Part:
        """This rank's query heads; every rank has the same number.

        Raises:
            ModelDirectoryError: the heads cannot be split evenly.
        """
        name, size = "num_attention_heads", self.tp.size
        if num_heads % size:
            raise ModelDirectoryError(
                f"config.json: {name} {num_heads} is not a multiple of {size} tensor-parallel ranks"
            )
        return self.part(name, num_heads)

    def kv_heads(self, num_kv_heads: int) -> Part:
        """The key/value heads of this rank's query heads: its own, or one shared with other ranks.

        Raises:
            ModelDirectoryError: the heads can be neither split nor shared evenly.
        """
        rank, size = self.tp.rank, self.tp.size
        if num_kv_heads % size == 0:
            return self.part("num_key_value_heads", num_kv_heads)
        if size % num_kv_heads:
            raise ModelDirectoryError(
                f"config.json: num_key_value_heads {num_kv_heads} is neither a multiple nor a divisor of {size} "
                "tensor-parallel ranks"
            )
        shared = rank * num_kv_heads // size
        return Part(num_kv_heads, shared, shared + 1)
