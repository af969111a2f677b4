"""Drafts from multi-token prediction (MTP) layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from services.worker.batch.decodes import Drafts
from services.worker.batch.enter_checks import BatchLimits
from services.worker.batch.step_input import StepInput
from services.worker.drafts.device_passes import DevicePasses, PlacedPasses, Sequences
from services.worker.drafts.drafter import ComputedTokens, DraftProposer, DraftRows, Observe
from services.worker.drafts.greedy_drafts import DraftChain
from services.worker.drafts.token_runs import TokenRuns
from services.worker.forward.forward_context import get_forward_context
from services.worker.forward.kv_cache import KvCache
from services.worker.forward.staging import HostArrays, upload_arrays
from services.worker.models.protocol import MtpLayers
from services.worker.ops import Ops, SlotColumns
from shared.step.columns import Int32Column

_IntArray = npt.NDArray[np.int64]


class MtpProposer(DraftProposer):
    """Lets MTP layers continue from the model's hidden states.

    A layer combines a token's hidden state (from the previous layer; for the first layer, from the model) with the next
    token. So after each step the layers compute every token with a successor that became known: a row's tokens, and a
    chunk's tokens except the last, whose hidden state waits for the next chunk. The host does not know yet which drafts
    were accepted, so rejected ones are computed too; no token before them sees that, and the next step overwrites it.
    Between steps the layers have computed all known tokens but the last. Drafting starts from the states left there
    and continues layer by layer, repeating the last one.

    In a prefix from the prefix cache the last token's KV depends on what followed in the sequence that was there first.
    Entries never written are zero, or left from an earlier sequence. This may spoil drafts, but never the output: the
    model's own layers do not read it.

    Where later drafts share the first one's selection (`MtpLayers.num_shared_positions`), they attend to exactly what
    the newest token with a known successor attended to: neither to themselves nor to each other.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.2; vLLM's `EagleProposer`, which also repeats layers, and its
    `MTPSpeculator`, which also shares selections.
    """

    needs_tokens = False
    reads_decodes = True
    follows_steps = True

    def __init__(self, layers: MtpLayers, ops: Ops) -> None:
        self._layers = layers
        self._ops = ops
        self._kv_cache: KvCache | None = None
        self._limits: BatchLimits | None = None
        # The slots' hidden states that wait for the next chunk, and the position of its first token; 0: none waits.
        self._awaited: _IntArray = np.empty(0, np.int64)  # [max_num_seqs]
        # Slots that the device is to forget with the next step.
        self._forgotten: list[int] = []
        self._waiting = torch.empty(0)  # [max_num_seqs, hidden]
        # What each layer computed last for each slot.
        self._last = torch.empty(0)  # [num_layers, max_num_seqs, hidden]
        # The positions that the first layer attended to for that, -1 for unused entries.
        self._selected = torch.empty(0)  # [max_num_seqs, num_shared_positions]

    @override
    def attach(self, limits: BatchLimits, kv_cache: KvCache) -> None:
        self._kv_cache, self._limits = kv_cache, limits
        self._awaited = np.zeros(limits.max_num_seqs, np.int64)
        self._forgotten = []
        self._waiting = torch.zeros(limits.max_num_seqs, 0)
        self._last = torch.zeros(self._layers.num_layers, limits.max_num_seqs, 0)
        sizes = (limits.max_num_seqs, self._layers.num_shared_positions)
        self._selected = torch.zeros(sizes, dtype=torch.int64, device=kv_cache.device)

    @override
    def forget(self, slots: Int32Column) -> None:
        self._awaited[slots] = 0
        self._forgotten += slots.tolist()

    @override
    def observe(self, inputs: StepInput) -> Observe | None:
        first = inputs.arrays["positions"][inputs.cu_seqlens_q[:-1]]
        is_awaited = (first > 0) & (first == self._awaited[inputs.slots])
        known = _KnownTokens.make(inputs, is_awaited)
        goes_on = np.ones(len(inputs.slots), np.bool_)
        goes_on[inputs.row_sequences()] = False
        self._awaited[inputs.slots] = np.where(goes_on, first + inputs.query_lens, 0)
        arrays = {
            "forgotten": np.array(self._forgotten, np.int64),
            "waiting_slots": inputs.slots[goes_on].astype(np.int64),
            "waiting": inputs.cu_seqlens_q[1:][goes_on].astype(np.int64) - 1,
        }
        self._forgotten = []

        def note(computed: ComputedTokens) -> None:
            self._make_room(computed.hidden)
            there = upload_arrays(arrays, computed.hidden.device)
            self._last[:, there["forgotten"]] = 0
            self._selected[there["forgotten"]] = 0
            if len(known.sequences):
                self._compute_known(known, computed)
            self._waiting[there["waiting_slots"]] = computed.hidden[there["waiting"]]

        return note

    def propose(self, rows: DraftRows) -> Drafts:
        """See `DraftProposer.propose`; the device computes them, see `greedy_drafts`."""
        assert self._limits is not None, "drafts before the first epoch"
        chain = DraftChain.make(rows.counts_in_room())
        drafting = chain.drafting
        arrays = {"slots": rows.slots[drafting].astype(np.int64), **chain.arrays()}
        ends = rows.ends(self._limits)[drafting]
        sequences = Sequences(rows.block_tables()[drafting], ends, np.ones_like(ends))

        def compute(columns: SlotColumns) -> Tensor:
            assert self._kv_cache is not None, "drafts before the first epoch"
            passes = DevicePasses(self._ops, self._kv_cache, sequences, arrays)
            # The first draft is combined with the hidden state of the token just before it, the last one.
            firsts = columns.position.index_select(0, passes.arrays["slots"])
            return self._draft(chain, passes.place_tokens(firsts, len(chain.sizes) - 1), passes.arrays)

        return Drafts.on_device(chain.counts, compute)

    def _draft(self, chain: DraftChain, passes: PlacedPasses, arrays: dict[str, Tensor]) -> Tensor:
        """Compute a chain's drafts, row after row."""

        def advance(token_ids: Tensor, hidden: Tensor, num_drafted: int) -> Tensor:
            layer = min(num_drafted, self._layers.num_layers - 1)
            return passes.compute(partial(forward, hidden, token_ids, layer=layer), num_drafted - 1, len(token_ids))

        def forward(hidden: Tensor, token_ids: Tensor, positions: Tensor, layer: int) -> Tensor:
            if self._layers.num_shared_positions:
                get_forward_context().selection.pin(self._selected[arrays["slots"][: len(positions)]])
            return self._layers.forward(hidden, token_ids, positions, layer)

        first = self._last[0].index_select(0, arrays["slots"])
        drafts = chain.draft(first, compute_logits=self._layers.compute_logits, ops=self._ops, advance=advance)
        return drafts[arrays["by_row"]]

    def _make_room(self, hidden: Tensor) -> None:
        """Size and dtype are known with the epoch's first step."""
        if not self._waiting.shape[1]:
            self._waiting = hidden.new_zeros(len(self._waiting), hidden.shape[1])
            self._last = hidden.new_zeros(*self._last.shape[:2], hidden.shape[1])

    def _compute_known(self, known: _KnownTokens, computed: ComputedTokens) -> None:
        """Run all layers over `known`, which are those of a step."""
        assert self._kv_cache is not None, "drafts before the first epoch"
        sequences = Sequences.of_runs(known.runs, known.block_tables)
        passes = DevicePasses(self._ops, self._kv_cache, sequences, known.arrays())
        arrays = passes.arrays
        starts, lasts, slots = (arrays[name] for name in ("starts", "lasts", "slots"))
        token_ids = arrays["token_ids"].index_copy(0, arrays["drawn"], computed.drawn)
        if computed.counts is not None:
            # From a row's last draft back to its last token that counts.
            lasts = lasts.index_add(0, arrays["row_runs"], computed.counts - arrays["num_drawn"])
        hidden = computed.hidden[arrays["places"]]
        hidden[arrays["awaited"]] = self._waiting[arrays["awaited_slots"]]

        def forward(positions: Tensor) -> Tensor:
            states = hidden
            for layer in range(self._layers.num_layers):
                its_states = self._layers.forward(states, token_ids, positions, layer)
                if not layer and self._layers.num_shared_positions:
                    self._selected[slots] = self._selection_of(lasts, positions)
                # The next layer looks one token further ahead: each token takes the state of the token before it.
                states = its_states.roll(1, dims=0)
                states[starts] = self._last[layer, slots]
                self._last[layer, slots] = its_states[lasts]
            return states

        passes.place_runs(arrays["firsts"]).compute(forward)

    def _selection_of(self, rows: Tensor, positions: Tensor) -> Tensor:
        """What some tokens of the running pass attended to, [num_rows, num_shared_positions] int64."""
        selected = get_forward_context().selection.positions
        if selected is not None:
            return selected[rows]
        all_positions = torch.arange(self._layers.num_shared_positions, device=positions.device)
        return torch.where(all_positions <= positions[rows][:, None], all_positions, -1)


@dataclass(frozen=True, slots=True)
class _KnownTokens:
    """Tokens with a successor that becomes known in a step, and rejected drafts after them."""

    runs: TokenRuns
    block_tables: Int32Column  # [num_runs, most blocks of one run]
    sequences: _IntArray  # [num_runs], indexes of the step's sequences
    slots: _IntArray  # [num_runs]
    places: _IntArray  # [num_tokens], where their hidden states are in the step; meaningless for those that waited
    token_ids: _IntArray  # [num_tokens], their successors; meaningless for those that are drawn
    drawn: _IntArray  # [num_places], indexes of the tokens whose successors are drawn
    row_runs: _IntArray  # [num_rows], the run of each row
    num_drawn: _IntArray  # [num_rows], how many successors are drawn for it
    awaited: _IntArray  # [num_awaited], indexes of the tokens with hidden states that waited
    awaited_slots: _IntArray  # [num_awaited]

    @classmethod
    def make(cls, inputs: StepInput, is_awaited: npt.NDArray[np.bool_]) -> _KnownTokens:
        """`is_awaited` marks sequences with a hidden state that waited for this step."""
        num_waiting = is_awaited.astype(np.int64)
        rows, starts = inputs.row_sequences(), inputs.cu_seqlens_q[:-1]
        lengths = inputs.query_lens + num_waiting - 1
        # The step draws a successor of a row's last token too.
        lengths[rows] += 1
        sequences = np.flatnonzero(lengths)
        first = inputs.arrays["positions"][starts] - num_waiting
        runs = TokenRuns(first[sequences], lengths[sequences])
        places = runs.spread((starts - num_waiting)[sequences])
        token_ids = inputs.arrays["token_ids"][np.minimum(places + 1, inputs.num_tokens - 1)]
        row_runs = np.searchsorted(sequences, rows)
        num_drawn = np.ones(len(rows), np.int64)
        if inputs.draft_counts is not None:
            num_drawn += inputs.draft_counts
        first_drawn = runs.lasts[row_runs] + 1 - num_drawn
        slots = inputs.slots.astype(np.int64)
        return cls(
            runs=runs,
            block_tables=inputs.arrays["block_tables"][sequences],
            sequences=sequences,
            slots=slots[sequences],
            places=places,
            token_ids=token_ids,
            drawn=TokenRuns(first_drawn, num_drawn).spread(first_drawn),
            row_runs=row_runs,
            num_drawn=num_drawn,
            awaited=runs.starts[is_awaited[sequences]],
            awaited_slots=slots[is_awaited],
        )

    def arrays(self) -> HostArrays:
        """What the layers need on the device besides what `Sequences` names itself."""
        return {
            "firsts": self.runs.first_positions,
            "slots": self.slots,
            "places": self.places,
            "token_ids": self.token_ids,
            "drawn": self.drawn,
            "row_runs": self.row_runs,
            "num_drawn": self.num_drawn,
            "starts": self.runs.starts,
            "lasts": self.runs.lasts,
            "awaited": self.awaited,
            "awaited_slots": self.awaited_slots,
        }
