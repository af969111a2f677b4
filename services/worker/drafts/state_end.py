"""The end of steps for recurrent states where tokens are drafted: accepted tokens are replayed, and states saved.

How many tokens a decode takes in is known only now, and so is whether a block ends among them. The state of a decode is
saved at the last end of a block that it passes, in the middle of the replay:

    tokens taken in before    14
    accepted                  t d0 d1     the blocks have 16 tokens
    replayed                  t d0        the state after 16 tokens is saved
    replayed                  d1

If none ends, nothing is saved. The scheduler learns from the number of tokens that a row got which of these it was.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.batch.step_input import StepInput
from services.worker.drafts.drafted_states import DraftedStates
from services.worker.forward.staging import upload_arrays
from services.worker.forward.state_cache import StateCache
from shared.step.columns import Int32Column


class StateEnd:
    """Ends the steps of an epoch with a draft proposer."""

    def __init__(self, states: StateCache, drafted: DraftedStates, block_size: int) -> None:
        self._states = states
        self._drafted = drafted
        self._block_size = block_size

    def finish(self, step_input: StepInput, counts: Int32Column | None, row_width: int) -> Tensor | None:
        """Bring the states to the end of a step. The host does not wait for it.

        Args:
            step_input: If it has drafts, its decodes were computed from copies of their states.
            counts: [num_rows], tokens that each row got, those of decodes first; None means one each.
            row_width: Tokens between the firsts of two decodes in a graph of drafts; 0 for a step without padding.

        Returns:
            [num_saves] int32, 1 for a saved state that is not finite; None if the step has no saves.
        """
        num_decodes = step_input.num_decodes
        lengths = step_input.query_lens.copy()
        lengths[:num_decodes] = 1 if counts is None else counts[:num_decodes]
        until_saves, is_saved = self._find_saves(step_input, lengths)
        if step_input.draft_counts is None:
            return self._save(step_input, is_saved)
        firsts = step_input.cu_seqlens_q[:num_decodes]
        if row_width:
            firsts = np.arange(num_decodes, dtype=np.int32) * np.int32(row_width)
        slots, first_part = step_input.slots[:num_decodes], until_saves[:num_decodes]
        self._drafted.replay(slots, firsts=firsts, counts=first_part)
        not_finite = self._save(step_input, is_saved)
        rest = lengths[:num_decodes] - first_part
        if len(later := rest.nonzero()[0]):
            self._drafted.replay(slots[later], firsts=(firsts + first_part)[later], counts=rest[later])
        return not_finite

    def _find_saves(self, step_input: StepInput, lengths: Int32Column) -> tuple[Int32Column, npt.NDArray[np.bool_]]:
        """Where states are saved.

        Args:
            lengths: [num_seqs], tokens that each sequence takes in.

        Returns:
            [num_seqs], how many of them it takes in before its state is saved, all of them if it is not; and
            [num_saves], whether each is one.
        """
        until_saves, slots = lengths.copy(), step_input.changes.get("saved_from")
        if slots is None:
            return until_saves, np.empty(0, np.bool_)
        starts = step_input.context_lens - step_input.query_lens
        passed = (starts + lengths) // self._block_size * self._block_size - starts
        # A prompt's chunk ends where its state is saved.
        passed[step_input.num_decodes :] = lengths[step_input.num_decodes :]
        slot_to_place = {slot: place for place, slot in enumerate(step_input.slots.tolist())}
        # A sequence that already had all its tokens takes none in.
        places = np.array([slot_to_place.get(slot, -1) for slot in slots.tolist()], np.int64)
        is_saved = places >= 0
        is_saved[is_saved] = passed[places[is_saved]] > 0
        until_saves[places[is_saved]] = passed[places[is_saved]]
        return until_saves, is_saved

    def _save(self, step_input: StepInput, is_saved: npt.NDArray[np.bool_]) -> Tensor | None:
        if not len(is_saved):
            return None
        changes = step_input.changes
        arrays = {name: changes[name][is_saved] for name in ("saved_from", "saved_to")}
        there = upload_arrays({**arrays, "indexes": is_saved.nonzero()[0]}, self._states.device)
        not_finite = torch.zeros(len(is_saved), dtype=torch.int32, device=self._states.device)
        return not_finite.index_copy_(0, there["indexes"], self._states.save(there["saved_from"], there["saved_to"]))
