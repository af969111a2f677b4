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
import torch
from torch import Tensor

from services.worker.batch.step_input import StepInput
from services.worker.drafts.drafted_states import DraftedStates
from services.worker.forward.staging import HostArrays
from services.worker.forward.state_cache import StateCache


class StateEnd:
    """Ends the steps of an epoch with a draft proposer. The host waits for nothing."""

    def __init__(self, states: StateCache, drafted: DraftedStates, block_size: int) -> None:
        self._states = states
        self._drafted = drafted
        self._block_size = block_size

    def arrays(self, step_input: StepInput, row_width: int) -> HostArrays:
        """What `finish` needs on the device.

        Args:
            row_width: Tokens between the firsts of two decodes in a graph of drafts; 0 for a step without padding.
        """
        num_decodes = step_input.num_decodes
        firsts = step_input.cu_seqlens_q[:num_decodes].astype(np.int64)
        if row_width:
            firsts = np.arange(num_decodes) * row_width
        arrays = {"replayed_slots": step_input.slots[:num_decodes].astype(np.int64), "replayed_firsts": firsts}
        return arrays | self._save_arrays(step_input)

    def finish(self, step_input: StepInput, arrays: dict[str, Tensor], counts: Tensor | None) -> Tensor | None:
        """Bring the states to the end of a step.

        Args:
            step_input: If it has drafts, its decodes were computed from copies of their states.
            arrays: Those that `arrays` and `state_changes` have named.
            counts: [num_rows] int64, tokens that each row got, those of decodes first; None means one each.

        Returns:
            [num_saves] int32, 1 for a saved state that is not finite; None if the step has no saves.
        """
        slots, firsts = arrays["replayed_slots"], arrays["replayed_firsts"]
        counts = torch.ones_like(slots) if counts is None else counts[: len(slots)]
        until_saves, is_saved = counts, None
        if "saved_from" in arrays:
            saved_decodes, decodes = arrays["saved_decodes"], arrays["decodes"]
            starts, lengths = arrays["saved_starts"], arrays["saved_lengths"]
            lengths = lengths.index_copy(0, saved_decodes, counts[decodes])
            passed = (starts + lengths) // self._block_size * self._block_size - starts
            is_saved = passed > 0
            until_save = torch.where(is_saved, passed, lengths)[saved_decodes]
            until_saves = counts.index_copy(0, decodes, until_save)
        has_drafts, most = step_input.draft_counts is not None, int(step_input.cu_seqlens_q[step_input.num_decodes])
        if has_drafts:
            self._drafted.replay(slots, firsts=firsts, counts=until_saves, most=most)
        if is_saved is None:
            return None
        not_finite = self._save(arrays, is_saved)
        if has_drafts and len(arrays["decodes"]):
            rest = counts - until_saves
            self._drafted.replay(slots, firsts=firsts + until_saves, counts=rest, most=most)
        return not_finite

    def _save_arrays(self, step_input: StepInput) -> HostArrays:
        """The arrays of saves: where each one's sequence begins in a block, and how many tokens it takes in.

        Those of decodes, `saved_decodes` among the saves and `decodes` among the step's, are known with their counts.
        """
        saved = step_input.arrays.get("saved_from")
        if saved is None:
            return {}
        starts, lengths = np.zeros(len(saved), np.int64), np.zeros(len(saved), np.int64)
        slot_to_place = {slot: place for place, slot in enumerate(step_input.slots.tolist())}
        # A sequence that already had all its tokens takes none in.
        places = np.array([slot_to_place.get(slot, -1) for slot in saved.tolist()], np.int64)
        # A prompt's chunk ends where its state is saved.
        lengths[places >= step_input.num_decodes] = self._block_size
        is_decode = (places >= 0) & (places < step_input.num_decodes)
        decodes = places[is_decode]
        starts[is_decode] = (step_input.context_lens - step_input.query_lens)[decodes] % self._block_size
        return {
            "saved_starts": starts,
            "saved_lengths": lengths,
            "saved_decodes": np.flatnonzero(is_decode),
            "decodes": decodes,
        }

    def _save(self, arrays: dict[str, Tensor], is_saved: Tensor) -> Tensor:
        """Save some of the step's saves; what is not saved is that of padding, where nothing is read."""
        spare = self._states.spare_slot
        sources, targets = (arrays[name].masked_fill(~is_saved, spare) for name in ("saved_from", "saved_to"))
        return self._states.save(sources, targets).masked_fill(~is_saved, 0)
