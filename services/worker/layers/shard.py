"""What the layers of one rank are made of, and which part of a model's dimensions is the rank's."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.layers.expert_parallel import nth_run
from services.worker.ops import Ops
from services.worker.parallel.communicator import SINGLE, Communicator, Parallel
from services.worker.weights.model_weights import ModelWeights
from shared.model_dir import ModelDirectoryError


@dataclass(frozen=True, slots=True)
class Part:
    """A run of a dimension, in what the dimension is counted in: heads, or columns."""

    # Of the whole dimension.
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
        """The places in it."""
        return slice(self.start, self.stop)

    def times(self, width: int) -> Part:
        """The same part of a dimension in which everything counted here is `width` places wide."""
        return Part(self.total * width, self.start * width, self.stop * width)


@dataclass(frozen=True, slots=True)
class Shard:
    """What the layers of one rank are made of."""

    ops: Ops
    weights: ModelWeights
    parallel: Parallel = SINGLE

    @property
    def tp(self) -> Communicator:
        """Between the ranks that a layer is split over."""
        return self.parallel.tp

    def parts(self, name: str, total: int) -> list[Part]:
        """Each rank's part of a dimension: as even as can be, the first ones have one more if there is a rest.

        Args:
            name: The dimension's in config.json.
            total: Its size.

        Raises:
            ModelDirectoryError: there is less of it than there are ranks.
        """
        size = self.tp.size
        if total < size:
            raise ModelDirectoryError(f"config.json: {name} {total} cannot be split over {size} tensor-parallel ranks")
        runs = [nth_run(total, rank, size) for rank in range(size)]
        return [Part(total, run.start, run.stop) for run in runs]

    def part(self, name: str, total: int) -> Part:
        """This rank's; see `parts`."""
        return self.parts(name, total)[self.tp.rank]

    def heads(self, num_heads: int) -> Part:
        """This rank's query heads, as many as any other's.

        Raises:
            ModelDirectoryError: they cannot be split so.
        """
        name, size = "num_attention_heads", self.tp.size
        if num_heads % size:
            raise ModelDirectoryError(f"config.json: {name} {num_heads} is no multiple of {size} tensor-parallel ranks")
        return self.part(name, num_heads)

    def kv_heads(self, num_kv_heads: int) -> Part:
        """The key/value heads of this rank's query heads: its own, or where there are more ranks one that some share.

        Raises:
            ModelDirectoryError: they can neither be split nor shared so.
        """
        rank, size = self.tp.rank, self.tp.size
        if num_kv_heads % size == 0:
            return self.part("num_key_value_heads", num_kv_heads)
        if size % num_kv_heads:
            raise ModelDirectoryError(
                f"config.json: num_key_value_heads {num_kv_heads} is neither a multiple of {size} tensor-parallel "
                "ranks nor do so many ranks share each evenly"
            )
        shared = rank * num_kv_heads // size
        return Part(num_kv_heads, shared, shared + 1)
