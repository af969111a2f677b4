"""What a step tells the layers besides its tokens: which rows belong together and where their KV lies.

It is module-level state by design: a captured graph takes no Python arguments, so layers find attention metadata
and the KV cache here. The worker's main thread sets it around each forward pass; no other thread runs one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from services.worker.forward.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which tokens a step computes, for which sequences, and which KV slots they use.

    Tensors are on the worker's device. The tuples are copies on the host, so that no op has to wait for the
    device to learn a length. In a decode step a query length is 1, and more for a row with drafts.
    """

    is_prefill: bool
    # [num_tokens] int64: block_id * block_size + offset, no repeats; -1 is a padded token, skipped.
    slot_mapping: Tensor
    # [num_seqs, max_blocks] int32; entries behind a sequence's last block are 0 and never read as context.
    block_tables: Tensor
    # [num_seqs] int32: KV tokens of each sequence, this step's included.
    context_lens: Tensor
    # [num_seqs + 1] int32: this step's tokens of sequence i are rows [cu[i], cu[i + 1]).
    cu_seqlens_q: Tensor
    # Host copies of the tokens per sequence: this step's, and all.
    query_lens: tuple[int, ...]
    context_lens_host: tuple[int, ...]
    max_query_len: int
    max_context_len: int


class AttentionPlan:
    """What a backend derives from a step's metadata once, for use in every layer. Backends subclass it."""

    __slots__ = ("metadata",)

    def __init__(self, metadata: AttentionMetadata) -> None:
        self.metadata = metadata


class AttentionPlanner(Protocol):
    """The part of a backend that plans a step's attention; see `Ops.plan_attention`."""

    def plan_attention(self, metadata: AttentionMetadata, kv_cache: KvCache) -> AttentionPlan: ...


@dataclass(frozen=True, slots=True)
class DpMetadata:
    """What the coupled DP ranks compute in the same step; it comes with the plan, so that nobody has to ask."""

    # Tokens of each rank, a dummy's one token included; empty where ranks are not coupled.
    num_tokens_across_dp: tuple[int, ...] = ()
    # Rows that a captured graph must hold on each of them; 0 where ranks are not coupled.
    graph_batch_size: int = 0


UNCOUPLED = DpMetadata()


class Progress:
    """Counts what has been computed, for whoever wants to know whether a device gets on.

    One thread counts; any may read.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def advance(self) -> None:
        """A layer or a step has been computed."""
        self.count += 1


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The surroundings of one forward pass."""

    attention: AttentionMetadata
    kv_cache: KvCache
    plan: AttentionPlan
    dp: DpMetadata = UNCOUPLED
    # Every layer advances it.
    progress: Progress = field(default_factory=Progress)

    @classmethod
    def for_step(
        cls,
        ops: AttentionPlanner,
        attention: AttentionMetadata,
        kv_cache: KvCache,
        *,
        dp: DpMetadata = UNCOUPLED,
        progress: Progress | None = None,
    ) -> ForwardContext:
        """The context of one step, with the plan that `ops` makes for it; without `progress` nobody watches."""
        return cls(attention, kv_cache, ops.plan_attention(attention, kv_cache), dp, progress or Progress())


_current: ForwardContext | None = None


def get_forward_context() -> ForwardContext:
    """The context of the forward pass that is running; there is one whenever a layer runs."""
    assert _current is not None, "a layer ran outside of forward_context()"
    return _current


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` the current one for the body; the former one comes back afterwards."""
    global _current  # noqa: PLW0603 - see the module's docstring
    former, _current = _current, context
    try:
        yield
    finally:
        _current = former
