"""Drafts from a smaller model with the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor
from typing_extensions import override

from services.worker.batch.decodes import NO_DRAFTS, Drafts
from services.worker.batch.enter_checks import BatchLimits
from services.worker.batch.step_input import StepInput
from services.worker.drafts.device_passes import DevicePasses, Sequences
from services.worker.drafts.drafter import ComputedTokens, DraftProposer, DraftRows, Observe, in_room
from services.worker.drafts.greedy_drafts import DraftChain
from services.worker.drafts.token_runs import TokenRuns
from services.worker.forward.kv_cache import KvCache
from services.worker.forward.staging import HostArrays
from services.worker.models.registry import CausalLM
from services.worker.ops import Ops, SlotColumns
from shared.step.columns import Int32Column


class DraftModelProposer(DraftProposer):
    """Lets a draft model continue each sequence greedily, up to its own context length.

    Its KV cache has the large model's blocks and block tables. `observe` computes a step's prompt chunks right after
    it, so that sequences that share their blocks find the KV there; `propose` the tokens that a sequence got since
    then.

    After a step that checked drafts of a sequence, only the device may know how many tokens it got. The drafts were
    computed, all but the last one, so at most two tokens were not:

        drafted           d0 d1 d2        d2 was not computed
        all accepted      d0 d1 d2 x      d2 and x are computed now
        d0 accepted       d0 x            x is; what is computed before it is not stored

    Invariant: the first `_num_computed` tokens of each slot need no more computing. Their KV is in the cache, except
    perhaps the end of a cached prefix, if the sequence that computed it was not drafted for since. Entries never
    written are zero, or left from an earlier sequence. This may spoil drafts, but never the output.
    """

    needs_tokens = False
    follows_steps = True

    def __init__(self, model: CausalLM, ops: Ops) -> None:
        self._model = model
        self._ops = ops
        self.kv_cache_spec = model.kv_cache_spec
        self._kv_cache: KvCache | None = None
        self._limits: BatchLimits | None = None
        # Meaningless for a slot whose last drafts are not learned about yet.
        self._num_computed = np.empty(0, np.int32)
        # Whether that is so, and the drafts that followed such a step.
        self._has_drafts = np.empty(0, np.bool_)
        self._num_ahead = np.empty(0, np.int32)
        # The drafts that the device was given last, and of each slot the row that it had there.
        self._last: _LastDrafts | None = None
        self._last_rows = np.empty(0, np.int64)

    @override
    def attach(self, limits: BatchLimits, kv_cache: KvCache) -> None:
        cache, sizes = self._kv_cache, (kv_cache.num_blocks, kv_cache.block_size)
        if cache is None or (cache.num_blocks, cache.block_size) != sizes:
            # Free the old cache first: there may be no memory for two.
            self._kv_cache = cache = None
            self._kv_cache = KvCache(self.kv_cache_spec, *sizes, kv_cache.device)
        self._limits = replace(limits, context_length=min(limits.context_length, self._model.context_length))
        self._num_computed, self._num_ahead = np.zeros((2, limits.max_num_seqs), np.int32)
        self._has_drafts = np.zeros(limits.max_num_seqs, np.bool_)
        self._last_rows = np.zeros(limits.max_num_seqs, np.int64)

    @override
    def forget(self, slots: Int32Column) -> None:
        self._has_drafts[slots] = False

    @override
    def observe(self, inputs: StepInput) -> Observe | None:
        if not inputs.is_prefill:
            return None
        slots, first_tokens = inputs.slots[inputs.num_decodes :], inputs.cu_seqlens_q[inputs.num_decodes : -1]
        first = inputs.arrays["positions"][first_tokens]
        lengths = np.clip(self._model.context_length - first, 0, inputs.query_lens[inputs.num_decodes :])
        self._num_computed[slots] = first + lengths
        fitting = np.flatnonzero(lengths)
        if not len(fitting):
            return None
        runs = TokenRuns(first[fitting], lengths[fitting])
        token_ids = inputs.arrays["token_ids"][runs.spread(first_tokens[fitting])]
        tables = inputs.arrays["block_tables"][inputs.num_decodes :][fitting]

        def compute_chunks(_: ComputedTokens) -> None:
            assert self._kv_cache is not None, "drafts before the first epoch"
            others = {"token_ids": token_ids, "firsts": runs.first_positions}
            chunks = DevicePasses(self._ops, self._kv_cache, Sequences.of_runs(runs, tables), others)
            arrays = chunks.arrays
            chunks.place_runs(arrays["firsts"]).compute(partial(self._model.forward, arrays["token_ids"]))

        return compute_chunks

    @override
    def learn(self, slots: Int32Column, num_known: Int32Column) -> None:
        num_ahead = self._num_ahead[slots]
        # Rejected drafts were computed too. The newest token was only just drawn: what is valid ends before it.
        num_valid = np.minimum(self._num_computed[slots], num_known - 1)
        self._num_computed[slots] = np.where(num_ahead > 0, num_known + num_ahead - 1, num_valid)
        self._has_drafts[slots], self._num_ahead[slots] = num_ahead > 0, 0

    def propose(self, rows: DraftRows) -> Drafts:
        """See `DraftProposer.propose`; the device computes them, see `greedy_drafts`."""
        assert self._limits is not None, "drafts before the first epoch"
        # The last draft is never computed, so it may be one past the context.
        room = self._model.context_length + 1 - rows.num_tokens
        counts: Int32Column = np.maximum(np.minimum(room, rows.counts_in_room()), 0)
        num_computed, num_known = self._num_computed[rows.slots], rows.num_known
        is_ahead = rows.num_tokens > num_known
        # What only the device knows of the last step is whether its drafts were accepted.
        follows_drafts = is_ahead & self._has_drafts[rows.slots]
        num_missing = np.where(follows_drafts, 2, rows.num_tokens - num_computed)
        num_missing[counts == 0] = 0
        # What is computed in one forward pass.
        lengths = in_room(num_missing, self._limits.max_num_batched_tokens).copy()
        lengths[follows_drafts & (lengths < 2)] = 0
        # A sequence with too many missing tokens computes some of them now, and drafts some steps later.
        counts[lengths < num_missing] = 0
        self._num_computed[rows.slots] = num_computed + lengths + np.maximum(counts - 1, 0)
        self._has_drafts[rows.slots] = counts > 0
        self._num_ahead[rows.slots] = np.where(is_ahead, counts, 0)
        chain = DraftChain.make(counts)
        # Rows that draft have missing tokens, so they stay first.
        active = chain.order[lengths[chain.order] > 0]
        if not len(active):
            return Drafts(NO_DRAFTS, counts)
        slots = rows.slots[active].astype(np.int64)
        backlog = _Backlog(
            slots=slots,
            token_ids=[rows.token_ids[row] for row in active.tolist()],
            firsts=num_computed[active].astype(np.int64),
            lengths=lengths[active],
            follows_drafts=follows_drafts[active],
            last_rows=self._last_rows[slots],
            is_to_end=(is_ahead & (lengths == num_missing))[active],
        )
        self._last_rows[slots] = np.arange(len(slots))
        sequences = Sequences(rows.block_tables()[active], rows.ends(self._limits)[active], backlog.lengths)
        return Drafts.on_device(counts, lambda columns: self._draft(chain, backlog, sequences, columns))

    def _draft(self, chain: DraftChain, backlog: _Backlog, sequences: Sequences, columns: SlotColumns) -> Tensor:
        """Compute the missing tokens, and then the chain's drafts, row after row."""
        assert self._kv_cache is not None, "drafts before the first epoch"
        passes = DevicePasses(self._ops, self._kv_cache, sequences, {**backlog.arrays(), **chain.arrays()})
        arrays = passes.arrays
        slots, token_ids, firsts, stored_from = arrays["slots"], arrays["token_ids"], arrays["firsts"], None
        positions = columns.position.index_select(0, slots)
        if "newest" in arrays:
            token_ids = token_ids.index_copy(0, arrays["newest"], columns.last_token[arrays["ahead_slots"]])
        if "followers" in arrays:
            assert self._last is not None, "drafts were computed"
            followers = arrays["followers"]
            lasts = positions[followers]
            last_drafts, all_accepted_at = self._last.of_rows(arrays["last_rows"])
            token_ids = token_ids.index_copy(0, arrays["starts"], last_drafts)
            firsts = firsts.index_copy(0, followers, lasts - 1)
            stored_from = arrays["stored_from"].index_copy(0, followers, lasts - (all_accepted_at == lasts).long())
        hidden = passes.place_runs(firsts, stored_from).compute(partial(self._model.forward, token_ids))
        if not chain.sizes:
            return arrays["by_row"]
        drafted = passes.place_tokens(positions + 1, len(chain.sizes) - 1)

        def advance(token_ids: Tensor, _: Tensor, num_drafted: int) -> Tensor:
            return drafted.compute(partial(self._model.forward, token_ids), num_drafted - 1, len(token_ids))

        first = hidden.index_select(0, arrays["lasts"][: chain.sizes[0]])
        drafts = chain.draft(first, compute_logits=self._model.compute_logits, ops=self._ops, advance=advance)
        self._last = _LastDrafts(drafts, arrays["last_drafts"], positions, arrays["num_places"])
        return drafts.index_select(0, arrays["by_row"])


@dataclass(frozen=True, slots=True)
class _Backlog:
    """What each row computes before its drafts; some of that only the device knows."""

    slots: npt.NDArray[np.int64]  # [num_rows]
    token_ids: Sequence[Int32Column]  # [num_rows], each row's known tokens
    firsts: npt.NDArray[np.int64]
    """[num_rows], the first position of each; meaningless where `follows_drafts`."""
    lengths: Int32Column  # [num_rows], at least 1
    follows_drafts: npt.NDArray[np.bool_]
    """[num_rows], whether a row computes its last two tokens, which the host does not know."""
    last_rows: npt.NDArray[np.int64]
    """[num_rows], each one's row among the last drafts; meaningless for others than `follows_drafts`."""
    is_to_end: npt.NDArray[np.bool_]
    """[num_rows], whether it ends with a last token that the host does not know."""

    def arrays(self) -> HostArrays:
        """The arrays to upload."""
        ends = self.lengths.cumsum(dtype=np.int64)
        starts = ends - self.lengths
        token_ids = np.zeros(ends[-1], np.int64)
        rows = zip(self.token_ids, self.firsts.tolist(), self.lengths.tolist(), starts.tolist(), strict=True)
        for known, first, length, start in rows:
            # Fewer, or none, where the host does not know all.
            its_tokens = known[first : first + length]
            token_ids[start : start + len(its_tokens)] = its_tokens
        arrays = {"slots": self.slots, "token_ids": token_ids, "firsts": self.firsts, "lasts": ends - 1}
        if self.is_to_end.any():
            arrays |= {"newest": ends[self.is_to_end] - 1, "ahead_slots": self.slots[self.is_to_end]}
        if self.follows_drafts.any():
            arrays |= {
                "followers": self.follows_drafts.nonzero()[0],
                "starts": starts[self.follows_drafts],
                "last_rows": self.last_rows[self.follows_drafts],
            }
        return arrays


class _LastDrafts(NamedTuple):
    """The drafts of the last step that drafted, on the device, for steps that the host begins before it has results."""

    drafts: Tensor  # [num_drafts] int64, in the order of their chain
    last_places: Tensor  # [num_rows] int64, where among them each row's last one is
    positions: Tensor
    """[at least num_rows] int64, the position of the token before each row's drafts."""
    num_places: Tensor
    """[num_rows] int64, how many tokens are drawn for each if all are accepted."""

    def of_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The last draft of each of these rows, and where its next token is if all are accepted; both int64."""
        return self.drafts[self.last_places[rows]], self.positions[rows] + self.num_places[rows]
