"""What a step uploads: what the device needs for it and does not have."""

from __future__ import annotations

import numpy as np

from services.worker.batch.step_input import StepInput
from services.worker.forward.staging import HostArrays
from services.worker.runner.graphs.step_graphs import DraftGraph
from services.worker.runner.steps.coupling import StepGraph
from services.worker.runner.steps.step_states import StepStates
from services.worker.sampling.runs import Runs
from shared.step.columns import Int32Column


class StepArrays:
    """Names the arrays of an epoch's steps, each once, in the order of their launches."""

    def __init__(self, states: StepStates | None, *, has_drafts: bool) -> None:
        """As in `StepWork`."""
        self._states = states
        self._has_drafts = has_drafts
        # As the device has them.
        self._decode_slots: Int32Column = np.empty(0, np.int32)

    def of(self, step_input: StepInput, graph: StepGraph | None, runs: Runs) -> HostArrays:
        """A step's arrays, by name; see `StepJob` for its graph and its runs."""
        padded = graph if isinstance(graph, DraftGraph) else None
        arrays = dict(step_input.changes)
        if self._states is not None:
            arrays |= self._states.arrays(step_input, 0 if padded is None else padded.graphs.row_width)
        if step_input.is_plain_decode:
            if not np.array_equal(step_input.slots, self._decode_slots):
                self._decode_slots = step_input.slots
                arrays["decode_slots"] = step_input.slots.astype(np.int64)
            return arrays
        arrays |= {"row_slots": step_input.row_slots.astype(np.int64), "row_positions": step_input.row_positions}
        logit_tokens = step_input.logit_tokens()
        if logit_tokens is not None:
            arrays["logit_tokens"] = logit_tokens
        if step_input.draft_counts is not None:
            arrays["place_slots"] = arrays["row_slots"][runs.rows]
            arrays["place_positions"] = step_input.row_positions[runs.rows] + runs.offsets
            arrays |= {"run_firsts": runs.firsts, "run_wanted": runs.wanted}
            if step_input.chosen_drafts is not None:
                arrays["chosen_drafts"] = step_input.chosen_drafts
            if step_input.device_drafts is not None:
                # Decodes are a step's first sequences, so their tokens are its first ones too.
                arrays["drafted_places"] = places = runs.drafted()
                arrays["drafted_tokens"] = places + 1
        if padded is not None:
            arrays |= padded.graphs.pad(step_input, padded.size)
            if "drafted_tokens" in arrays:
                arrays["drafted_tokens"] = arrays["padded_places"][arrays["drafted_tokens"]]
            return arrays
        if step_input.num_decodes and not self._has_drafts:
            # Without drafts these are the first tokens.
            arrays["unknown_slots"] = step_input.slots[: step_input.num_decodes].astype(np.int64)
        return arrays | {
            "token_ids": step_input.token_ids,
            "positions": step_input.positions,
            "slot_mapping": step_input.slot_mapping,
            "block_tables": step_input.block_tables,
            "context_lens": step_input.context_lens,
            "cu_seqlens_q": step_input.cu_seqlens_q,
        }
