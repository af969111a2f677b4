"""Epochs: what each begins with, the memory of its KV cache, and what is compiled before its first step."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.worker.batch.device_batch import DeviceBatch
from services.worker.batch.enter_checks import BatchLimits
from services.worker.batch.input_batch import InputBatch
from services.worker.drafts.drafted_states import DraftedStates, ModelStates, drafted_bytes
from services.worker.drafts.drafter import Drafting
from services.worker.forward.forward_context import AttentionMetadata, ForwardContext, forward_context
from services.worker.forward.kv_cache import KvCache, KvCacheSpec
from services.worker.forward.staging import to_device
from services.worker.forward.state_cache import StateCache, spare_slots
from services.worker.models.loader import LoadedModel
from services.worker.ops import DecodeRows
from services.worker.runner.batch_runner import BatchRunner
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.cache_room import (
    CacheCosts,
    CacheRoom,
    divide_memory,
    memory_to_hold,
    room_of_blocks,
)
from services.worker.runner.graphs.graph_runner import GraphSettings, needed_sizes
from services.worker.runner.graphs.step_graphs import StepGraphs, capture_steps
from services.worker.runner.matchers import GrammarMatchers
from services.worker.runner.rank import Rank

_GIB = 1024**3
# More tokens take the kernels of some of these sizes, or of the most tokens.
_LARGEST_COMPILED = 1024


class _DraftedSizes(NamedTuple):
    num_rows: int
    num_tokens: int


class Epochs:
    """Begins a process's epochs, and keeps KV cache and graphs from each for the next if they fit it."""

    def __init__(
        self,
        rank: Rank,
        loaded: LoadedModel,
        kv_cache_size: KvCacheSize,
        *,
        drafting: Drafting | None,
        graphs: GraphSettings | None,
    ) -> None:
        """As in `ModelRunner`; `rank` computes `loaded`."""
        self._rank = rank
        self._facts = loaded.facts
        self._kv_cache_size = kv_cache_size
        self._drafting = drafting
        self._graph_settings = graphs
        self._matchers = GrammarMatchers(loaded.model_dir, loaded.facts.logits_width, loaded.facts.eos_token_ids)
        self.kv_cache: KvCache | None = None
        self.states: StateCache | None = None
        """None for a model without recurrent states."""
        self._drafted: DraftedStates | None = None
        self._drafted_sizes = _DraftedSizes(0, 0)
        self._room = CacheRoom(0)
        # The limit with which the room was divided, and what it was divided by.
        self._max_num_seqs = 0
        self._costs = CacheCosts(1, 1, 0)
        self.graphs: StepGraphs | None = None

    @property
    def num_draft_tokens(self) -> int:
        """Most tokens drafted for a sequence in a step; 0 without drafting."""
        return 0 if self._drafting is None else self._drafting.num_draft_tokens

    @property
    def num_blocks(self) -> int:
        """The KV blocks of the present epoch, or of the last one; 0 before the first. From any thread."""
        return 0 if self.kv_cache is None else self.kv_cache.num_blocks

    @property
    def room(self) -> CacheRoom:
        """What the present epoch has room for, or the last one had; nothing before the first. From any thread."""
        return CacheRoom(0) if self.kv_cache is None else self._room

    def begin(self, *, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> BatchRunner | None:
        """Begin an epoch with an empty batch; None if the memory does not hold one block.

        The device computes nothing, and the last epoch is over.
        """
        rank = self._rank
        limits = BatchLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_blocks=self.num_blocks,
            context_length=self._facts.context_length,
            logits_width=self._facts.logits_width,
        )
        cache, has_states = self.kv_cache, bool(rank.model.state_spec.layers)
        if cache is None or cache.block_size != block_size or (has_states and self._max_num_seqs != max_num_seqs):
            # Free the old caches first: there may be no memory for two. Graphs name their addresses.
            self.graphs = None
            self.kv_cache = self.states = self._drafted = cache = None
            self._room, self._max_num_seqs = self._find_room(limits), max_num_seqs
            limits = replace(limits, num_blocks=self._room.num_blocks)
            if not limits.num_blocks:
                return None
            self.kv_cache = cache = KvCache(rank.model.kv_cache_spec, limits.num_blocks, block_size, rank.device)
            if has_states:
                num_slots = self._room.num_seqs + self._room.num_checkpoints
                self.states = StateCache(rank.model.state_spec, num_slots, rank.device)
            # A CPU's kernels are compiled ahead, and so are torch's, of which ops that draw on the host are composed.
            # An epoch may reach only some of the coupled ranks; see `Replays`.
            if rank.device.type != "cpu" and not rank.ops.draws_on_host and not rank.layout.is_coupled:
                _compile_prefills(rank, limits, cache, self.states)
        states = None
        if self.states is not None:
            limits = replace(limits, max_live_states=self._room.num_seqs, num_checkpoints=self._room.num_checkpoints)
            states = ModelStates(self.states, self._find_drafted(limits, self.states))
        if self._graph_settings is not None and (self.graphs is None or not self.graphs.fits(limits, rank.layout)):
            # Free the old ones first.
            self.graphs = None
            settings, num_drafts = self._graph_settings, self.num_draft_tokens
            self.graphs = capture_steps(rank, cache, limits, settings, num_draft_tokens=num_drafts, states=states)
            if self.graphs is None:
                self._graph_settings = None
        proposer = None if self._drafting is None else self._drafting.proposer
        batch = InputBatch(
            limits,
            make_matcher=self._matchers.make,
            eos_token_ids=self._facts.eos_token_ids,
            drafter=None if self._drafting is None else self._drafting.begin(limits, cache),
            makes_decodes=proposer is not None and proposer.reads_decodes,
        )
        return BatchRunner(rank, batch, cache, graphs=self.graphs, proposer=proposer, states=states)

    def _find_drafted(self, limits: BatchLimits, states: StateCache) -> DraftedStates | None:
        """What keeps drafts from the states, from the last epoch if it fits; graphs that fit too name its addresses."""
        sizes = self._sizes_of_drafts(limits)
        if self._drafting is not None and (self._drafted is None or self._drafted_sizes != sizes):
            self._drafted = None
            self._drafted, self._drafted_sizes = DraftedStates(states, **sizes._asdict()), sizes
        return self._drafted

    def _sizes_of_drafts(self, limits: BatchLimits) -> _DraftedSizes:
        """The most decodes and tokens of a step with drafts, or of a graph that computes it."""
        settings = self._graph_settings
        sizes = () if settings is None else needed_sizes(settings.batch_sizes, limits.max_num_seqs)
        num_rows = max((*sizes, limits.max_num_seqs))
        return _DraftedSizes(num_rows, min(num_rows * (1 + self.num_draft_tokens), limits.max_num_batched_tokens))

    def _drafted_bytes(self, limits: BatchLimits) -> int:
        """What keeps drafts from the states, in bytes."""
        if self._drafting is None:
            return 0
        return drafted_bytes(self._rank.model.state_spec, **self._sizes_of_drafts(limits)._asdict())

    def how_to_hold(self, num_tokens: int) -> str:
        """See `ModelRunner.how_to_hold`."""
        size, costs = self._kv_cache_size, self._costs
        if size.num_blocks is not None:
            return f"--kv-cache-num-blocks {-(-num_tokens // costs.tokens_per_block)}"
        gib = math.ceil(memory_to_hold(num_tokens, costs, self._max_num_seqs) / _GIB * 100) / 100
        if size.measure is not None:
            return f"--gpu-memory-utilization that leaves {gib:g} GiB for it"
        return f"--kv-cache-memory-gib {gib:g}"

    def _find_room(self, limits: BatchLimits) -> CacheRoom:
        """The configured number of KV blocks, or what fits into the memory, possibly no block."""
        size, model = self._kv_cache_size, self._rank.model
        layers = model.kv_cache_spec.layers
        if self._drafting is not None:
            # The proposer's cache has the same blocks and comes out of the same memory.
            layers += self._drafting.proposer.kv_cache_spec.layers
        block_size = limits.block_size
        bytes_per_block = KvCacheSpec(layers).bytes_per_token * block_size
        costs = self._costs = CacheCosts(
            bytes_per_block, block_size, model.state_spec.bytes_per_slot, self._drafted_bytes(limits)
        )
        if size.num_blocks is not None:
            return room_of_blocks(size.num_blocks, costs, limits.max_num_seqs)
        memory_bytes = size.memory_bytes
        if size.measure is not None:
            memory_bytes = size.measure(partial(_run_largest_prefill, self._rank, limits))
        return divide_memory(memory_bytes, costs, limits.max_num_seqs)


@torch.inference_mode()
def _run_largest_prefill(rank: Rank, limits: BatchLimits) -> None:
    """Compute a prefill of as many tokens as a step may have, and the logits of as many rows; stores no KV."""
    cache = KvCache(rank.model.kv_cache_spec, 1, limits.block_size, rank.device)
    states = StateCache(rank.model.state_spec, 0, rank.device) if rank.model.state_spec.layers else None
    hidden = _run_prefill(rank, limits.max_num_batched_tokens, limits.context_length, cache, states)
    rank.model.compute_logits(hidden[: limits.max_num_seqs])


@torch.inference_mode()
def _compile_prefills(rank: Rank, limits: BatchLimits, cache: KvCache, states: StateCache | None) -> None:
    """Compute prefills of many sizes, so that none waits for the compiler when there are requests; stores no KV.

    Kernels differ by powers of two up to some size, and by whether a context may be long.
    """
    powers = [1 << bits for bits in range(1, _LARGEST_COMPILED.bit_length())]
    most = limits.max_num_batched_tokens
    sizes = {min(power + more, most) for power in powers for more in (0, 1)}
    for size in sorted(sizes | {most}):
        for longest in (size, limits.context_length):
            _run_prefill(rank, size, limits.context_length, cache, states, longest=longest)
    # The kernel that makes the inputs of decodes is in no graph.
    DeviceBatch(rank.ops, limits, rank.device).pad(DecodeRows.padding(1, 1, rank.device))


def _run_prefill(
    rank: Rank,
    num_tokens: int,
    context_length: int,
    cache: KvCache,
    states: StateCache | None,
    *,
    longest: int | None = None,
) -> Tensor:
    """Compute prompts of `num_tokens` together, as long as they may be, without storing their KV; hidden states.

    Args:
        states: Only that of padding is written.
        longest: A bound for every context, as of a step with longer ones; None means what they are.
    """
    length = min(num_tokens, context_length)
    starts = np.append(np.arange(0, num_tokens, length, dtype=np.int32), np.int32(num_tokens))
    lengths = np.diff(starts)
    longest = length if longest is None else longest
    attention = AttentionMetadata(
        is_prefill=True,
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=rank.device),
        # All of a context is read from the one block.
        block_tables=to_device(np.zeros((len(lengths), -(-length // cache.block_size)), np.int32), rank.device),
        context_lens=to_device(lengths, rank.device),
        cu_seqlens_q=to_device(starts, rank.device),
        query_lens=tuple(lengths.tolist()),
        context_lens_host=(longest,) * len(lengths),
        max_query_len=length,
        max_context_len=longest,
        state_slots=None if states is None else spare_slots(states, len(lengths)),
    )
    positions = to_device(np.arange(num_tokens, dtype=np.int64) % length, rank.device)
    plan = rank.ops.plan_attention(attention, cache)
    with forward_context(ForwardContext(plan, cache, progress=rank.progress, states=states)):
        return rank.model.forward(torch.zeros_like(positions), positions)
