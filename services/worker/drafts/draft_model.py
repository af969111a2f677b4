"""Drafts from a smaller model with the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor
from typing_extensions import override

from services.worker.batch.decodes import NO_DRAFTS, Drafts
from services.worker.batch.enter_checks import BatchLimits
from services.worker.batch.step_input import StepInput, StepTokens
from services.worker.drafts.drafter import ComputedTokens, DraftProposer, DraftRows, Observe
from services.worker.drafts.greedy_drafts import DraftChain
from services.worker.drafts.token_runs import ForwardPasses, TokenRuns
from services.worker.forward.kv_cache import KvCache
from services.worker.forward.staging import HostArrays
from services.worker.models.registry import CausalLM
from services.worker.ops import Ops
from shared.step.columns import Int32Column


class DraftModelProposer(DraftProposer):
    """Lets a draft model continue each sequence greedily, up to its own context length.

    Its KV cache has the large model's blocks and block tables. `observe` computes a step's prompt chunks right after
    it, so that sequences that share their blocks find the KV there; `propose` the tokens that a sequence got since
    then.

    Invariant: the first `_num_computed` tokens of each slot need no more computing. Their KV is in the cache, except
    perhaps the end of a cached prefix, if the sequence that computed it was not drafted for since. Entries never
    written are zero, or left from an earlier sequence. This may spoil drafts, but never the output.
    """

    def __init__(self, model: CausalLM, ops: Ops) -> None:
        self._model = model
        self._ops = ops
        self.kv_cache_spec = model.kv_cache_spec
        self._kv_cache: KvCache | None = None
        self._num_computed = np.empty(0, np.int32)
        self._max_tokens_at_once = 0

    @override
    def attach(self, limits: BatchLimits, kv_cache: KvCache) -> None:
        cache, sizes = self._kv_cache, (kv_cache.num_blocks, kv_cache.block_size)
        if cache is None or (cache.num_blocks, cache.block_size) != sizes:
            # Free the old cache first: there may be no memory for two.
            self._kv_cache = cache = None
            self._kv_cache = KvCache(self.kv_cache_spec, *sizes, kv_cache.device)
        self._num_computed = np.zeros(limits.max_num_seqs, np.int32)
        self._max_tokens_at_once = limits.max_num_batched_tokens

    @override
    def observe(self, inputs: StepInput, tokens: StepTokens) -> Observe | None:
        slots, first_tokens = inputs.slots[inputs.num_decodes :], inputs.cu_seqlens_q[inputs.num_decodes : -1]
        first = tokens.positions[first_tokens]
        lengths = np.clip(self._model.context_length - first, 0, inputs.query_lens[inputs.num_decodes :])
        self._num_computed[slots] = first + lengths
        fitting = np.flatnonzero(lengths)
        if not len(fitting):
            return None
        runs = TokenRuns(first[fitting], lengths[fitting])
        token_ids = tokens.token_ids[runs.spread(first_tokens[fitting])]
        tables = tokens.block_tables[inputs.num_decodes :][fitting]

        def compute_chunks(_: ComputedTokens) -> None:
            passes = self._passes(tables, [runs], {"token_ids": token_ids})
            self._compute(passes, 0, passes.arrays["token_ids"])

        return compute_chunks

    @override
    def learn(self, slots: Int32Column, num_known: Int32Column) -> None:
        # Rejected drafts were computed too. The newest token was only just drawn: what is valid ends before it.
        self._num_computed[slots] = np.minimum(self._num_computed[slots], num_known - 1)

    def propose(self, rows: DraftRows) -> Drafts:
        """See `DraftProposer.propose`; the device computes them, see `greedy_drafts`."""
        # The last draft is never computed, so it may be one past the context.
        counts = np.clip(self._model.context_length + 1 - rows.num_known, 0, rows.counts_in_room()).astype(np.int32)
        num_computed = self._num_computed[rows.slots]
        num_missing = np.where(counts > 0, rows.num_known - num_computed, 0)
        lengths = self._at_once(num_missing)
        # A sequence with too many missing tokens computes some of them now, and drafts some steps later.
        counts[lengths < num_missing] = 0
        self._num_computed[rows.slots] = num_computed + lengths + np.maximum(counts - 1, 0)
        chain = DraftChain.make(counts)
        # Rows that draft have missing tokens, so they stay first.
        active = chain.order[lengths[chain.order] > 0]
        if not len(active):
            return Drafts(NO_DRAFTS, counts)
        missing = [rows.token_ids[row][num_computed[row] : num_computed[row] + lengths[row]] for row in active.tolist()]
        num_known = rows.num_known[active]
        backlog = TokenRuns(num_computed[active], lengths[active])
        newest = [TokenRuns.single(num_known[:size] + place) for place, size in enumerate(chain.sizes[1:])]
        others = {
            "token_ids": np.concatenate(missing).astype(np.int64),
            "lasts": backlog.lasts,
            "by_row": chain.by_row(),
        }
        tables, runs = rows.block_tables()[active], [backlog, *newest]
        return Drafts.on_device(counts, lambda: self._draft(chain, self._passes(tables, runs, others)))

    def _draft(self, chain: DraftChain, passes: ForwardPasses) -> Tensor:
        """Compute the missing tokens, the first of `passes`, and then the chain's drafts, row after row."""
        hidden = self._compute(passes, 0, passes.arrays["token_ids"])

        def advance(token_ids: Tensor, _: Tensor, num_drafted: int) -> Tensor:
            return self._compute(passes, num_drafted, token_ids)

        if not chain.sizes:
            return passes.arrays["by_row"]
        first = hidden[passes.arrays["lasts"][: len(chain.drafting)]]
        drafts = chain.draft(first, compute_logits=self._model.compute_logits, ops=self._ops, advance=advance)
        return drafts[passes.arrays["by_row"]]

    def _at_once(self, num_missing: Int32Column) -> Int32Column:
        """How many of each row's missing tokens to compute in one forward pass, first rows first."""
        before = np.cumsum(num_missing) - num_missing
        lengths: Int32Column = np.clip(self._max_tokens_at_once - before, 0, num_missing).astype(np.int32)
        return lengths

    def _passes(self, block_tables: Int32Column, passes: Sequence[TokenRuns], others: HostArrays) -> ForwardPasses:
        assert self._kv_cache is not None, "drafts before the first epoch"
        return ForwardPasses(self._ops, self._kv_cache, block_tables=block_tables, passes=passes, others=others)

    def _compute(self, passes: ForwardPasses, number: int, token_ids: Tensor) -> Tensor:
        return passes.compute(number, lambda positions: self._model.forward(token_ids, positions))
