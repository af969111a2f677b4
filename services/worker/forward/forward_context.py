"""What layers need in a forward pass besides their inputs: which tokens belong together and where their KV is.

Not an argument by design: a captured graph takes none. Every thread has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from services.worker.forward.kv_cache import KvCache
from services.worker.forward.state_cache import StateCache


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A step's tokens, sequences and KV slots.

    Tensors are on the worker's device; the tuples are copies on the host, so that no op waits for the device. In a
    decode step a query length is 1, or more with drafts.
    """

    is_prefill: bool
    slot_mapping: Tensor  # [num_tokens] int64: block_id * block_size + offset, no repeats; -1: padding, not stored
    block_tables: Tensor  # [num_seqs, max_blocks] int32; 0 after a sequence's last block, never read as context
    context_lens: Tensor  # [num_seqs] int32: KV tokens of each sequence, including this step's
    cu_seqlens_q: Tensor  # [num_seqs + 1] int32: sequence i computes the tokens [cu[i], cu[i + 1])
    query_lens: tuple[int, ...]
    """This step's tokens of each sequence."""
    context_lens_host: tuple[int, ...]
    max_query_len: int
    max_context_len: int
    state_slots: Tensor | None = None
    """[num_seqs] int64: the row of each sequence's recurrent state, without repeats but for padding's; None for a model
    without states.
    """


# Lets the states of a recurrent layer take tokens in: what it takes in of each, [T, …], its states by slot, and which
# tokens are whose. Returns what it reads, [T, …].
TakeIn = Callable[[tuple[Tensor, ...], tuple[Tensor, ...], AttentionMetadata], Tensor]


class StateInputs(Protocol):
    """Decides what becomes of a pass's recurrent states."""

    def take_in(self, layer: int, inputs: tuple[Tensor, ...], function: TakeIn) -> Tensor:
        """Compute a layer with `function`; returns what it reads, of all of the pass's tokens."""


@dataclass(slots=True, eq=False)
class AttentionPlan:
    """What a backend derives from a step's metadata, once for all layers. Backends subclass it."""

    metadata: AttentionMetadata


@dataclass(frozen=True, slots=True)
class DpMetadata:
    """What coupled DP ranks compute in the same step. The step carries it, so ranks need not exchange it."""

    num_tokens_across_dp: tuple[int, ...] = ()
    """Tokens of each rank, 1 for a dummy; empty if ranks are not coupled. Those of a graph have its size."""
    graph_batch_size: int = 0
    """The size of the graph that runs, the same on all ranks; 0 if they run eagerly."""


UNCOUPLED = DpMetadata()


@dataclass(slots=True)
class ContextSelection:
    """The positions that a pass's tokens attend to in sparse attention, as the latest layer with an indexer selected.

    Layers without one attend to the same. Nothing is kept from one pass to the next, unless the next one is `pinned`.
    """

    positions: Tensor | None = None
    """What `Ops.select_context` returned; None means that every token attends to all tokens up to itself."""
    is_pinned: bool = False
    """Whether all layers take `positions` as they are."""

    def pin(self, positions: Tensor) -> None:
        """Let all layers attend to `positions`, whatever an indexer would select."""
        self.positions, self.is_pinned = positions, True


@dataclass(slots=True)
class Progress:
    """Counts computed layers, to show progress. One thread counts; any may read."""

    num_layers: int = 0


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The context of one forward pass."""

    plan: AttentionPlan
    """What `Ops.plan_attention` returned."""
    kv_cache: KvCache
    dp: DpMetadata = UNCOUPLED
    progress: Progress = field(default_factory=Progress)
    selection: ContextSelection = field(default_factory=ContextSelection)
    states: StateCache | None = None
    """None for a model without recurrent states."""
    drafted: StateInputs | None = None
    """What keeps drafts from the states; None if the states take in all tokens."""

    def take_in(self, layer: int, inputs: tuple[Tensor, ...], function: TakeIn) -> Tensor:
        """Compute a recurrent layer with `function`; see `TakeIn`."""
        if self.drafted is not None:
            return self.drafted.take_in(layer, inputs, function)
        assert self.states is not None, "the model has states"
        return function(inputs, self.states.layers[layer], self.plan.metadata)


_current: ContextVar[ForwardContext] = ContextVar("forward context")


get_forward_context: Callable[[], ForwardContext] = _current.get
"""The context of the running forward pass.

Raises:
    LookupError: a layer ran outside of `forward_context()`.
"""


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` current in the body."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
