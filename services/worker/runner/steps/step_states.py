"""What a step does with the recurrent states of its sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor
from typing_extensions import override

from services.worker.batch.step_input import StepInput
from services.worker.drafts.drafted_states import DraftedRows, DraftedStates, ModelStates
from services.worker.drafts.state_end import StateEnd
from services.worker.forward.forward_context import ForwardContext
from services.worker.forward.staging import HostArrays
from services.worker.forward.state_cache import StateCache


class StepStates:
    """States of sequences whose tokens are never drafts, so that the forward pass lets them take in all."""

    def __init__(self, cache: StateCache) -> None:
        self.cache = cache

    def arrays(self, step_input: StepInput, _: int) -> HostArrays:
        """What the device needs besides `StepInput.arrays`; see `StateEnd.arrays` for the number."""
        if step_input.is_plain_decode:
            return {}
        # A dummy has the state of padding.
        slots = step_input.slots if len(step_input.slots) else np.array([self.cache.spare_slot])
        return {"state_slots": slots.astype(np.int64)}

    def in_pass(self, context: ForwardContext, _: StepInput) -> ForwardContext:
        """The context of the step's forward pass, with its states."""
        return replace(context, states=self.cache)

    def end(self, _: StepInput, arrays: dict[str, Tensor], __: Tensor | None) -> Tensor | None:
        """Bring the states to the end of the step, and save some; see `StateEnd.finish`."""
        return self.cache.save(arrays["saved_from"], arrays["saved_to"]) if "saved_from" in arrays else None


class JudgedStates(StepStates):
    """States of sequences whose tokens may be drafts: a state takes those in that were accepted."""

    def __init__(self, cache: StateCache, drafted: DraftedStates, block_size: int) -> None:
        super().__init__(cache)
        self._drafted = drafted
        self._end = StateEnd(cache, drafted, block_size)

    @override
    def arrays(self, step_input: StepInput, row_width: int) -> HostArrays:
        return super().arrays(step_input, row_width) | self._end.arrays(step_input, row_width)

    @override
    def in_pass(self, context: ForwardContext, step_input: StepInput) -> ForwardContext:
        context = super().in_pass(context, step_input)
        if step_input.draft_counts is None:
            return context
        rows = DraftedRows.split(context.plan.metadata, step_input.num_decodes)
        return replace(context, drafted=self._drafted.of_pass(rows))

    @override
    def end(self, step_input: StepInput, arrays: dict[str, Tensor], counts: Tensor | None) -> Tensor | None:
        return self._end.finish(step_input, arrays, counts)


def states_in_steps(states: ModelStates, block_size: int) -> StepStates:
    """The states of an epoch whose KV blocks have this size."""
    if states.drafted is None:
        return StepStates(states.cache)
    return JudgedStates(states.cache, states.drafted, block_size)
