"""What a scheduler has said about its cell."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2
from shared.request.limits import ModelLimits
from shared.wire import Introduction, read_introduction


@dataclass(frozen=True, slots=True)
class LinkedCell:
    """The cell that the replica is linked to, or was last, as its scheduler describes it."""

    scheduler_instance_id: str
    eos_token_ids: tuple[int, ...]
    limits: ModelLimits
    default_sampling: common_pb2.SamplingParams
    exact_fingerprint: str
    """Empty if the cell is not exact."""
    weights_digest: str
    """Empty if the cell's workers do not report it."""
    introduction: Introduction
    """What all its services can do."""
    worker_start_s: float | None
    """How long a restart of its workers takes; None if it does not say."""
    implementation: str
    """Whose code computes the model; empty if its workers do not say."""
    embeds: bool
    """Whether the model makes vectors, and nothing else."""


def decode_cell_info(info: exchange_pb2.CellInfo) -> LinkedCell:
    """Decode a scheduler's description."""
    return LinkedCell(
        info.scheduler_instance_id,
        tuple(info.eos_token_ids),
        ModelLimits(info.context_length, info.logits_width, info.num_pool_tokens),
        info.default_sampling,
        info.exact_fingerprint,
        info.weights_digest,
        read_introduction(info.introduction),
        info.worker_start_time.ToMilliseconds() / 1e3 if info.HasField("worker_start_time") else None,
        info.implementation,
        info.task == "embed",
    )
