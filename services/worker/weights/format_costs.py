"""What the formats of a checkpoint's layers take, for the log."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass, fields

from torch import Tensor

from services.worker.ops.matrices import Matrix
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.weights.quantization.layer_format import LayerFormat

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Cost:
    """What the matrices of one format take that were treated alike."""

    num_matrices: int = 0
    stored_bytes: float = 0
    memory_bytes: int = 0


class FormatCosts:
    """Counts packed layers by format, and apart from those that were dequantised."""

    def __init__(self, kept: Set[MatrixFormat]) -> None:
        """`kept` are the formats that are not dequantised where that is possible."""
        self._kept = kept
        self._event_to_cost: defaultdict[tuple[str, str], _Cost] = defaultdict(_Cost)

    def add(self, layer_format: LayerFormat, matrix: Matrix, stored_bytes: float) -> None:
        """Count `matrix`, read from a layer in `layer_format`; `stored_bytes` is its share of the layer's tensors."""
        cost = self._event_to_cost[self._event(layer_format, matrix), layer_format.label]
        cost.num_matrices += 1
        cost.stored_bytes += stored_bytes
        cost.memory_bytes += num_bytes(matrix)

    def log(self) -> None:
        """Write one line per format, and two if some of its layers were dequantised and others not."""
        for (event, label), cost in self._event_to_cost.items():
            values = {"num_matrices": cost.num_matrices, "memory_bytes": cost.memory_bytes}
            logger.info(event, extra={"format": label, "stored_bytes": round(cost.stored_bytes), **values})

    def _event(self, layer_format: LayerFormat, matrix: Matrix) -> str:
        if not isinstance(matrix, Tensor):
            return "weights are computed with in the format they are stored in"
        if layer_format.packed_as in self._kept:
            return "weights were dequantised at load: these layers cannot be computed in their format"
        return "no kernel for this format: weights were dequantised at load, activations are not quantised"


def num_bytes(matrix: Matrix) -> int:
    """The memory of all its tensors."""
    if isinstance(matrix, Tensor):
        return matrix.nbytes
    values = (getattr(matrix, each.name) for each in fields(matrix))
    return sum(value.nbytes for value in values if isinstance(value, Tensor))
