"""A worker whose model is a hash: real messages and the real batch of the worker, and a device made of one array.

A KV cell holds the chained state of the tokens up to its own. The token drawn depends on the seed, on the position and
on every cell of the sequence, so that a wrong block table, a stale cache entry, a block reused too early or an
off-by-one replay changes the output.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lockstep.internal.v1 import worker_pb2
from services.scheduler.batch import Step, StepResult
from services.scheduler.worker_client import decode_result, encode_step
from services.worker.input_batch import BatchLimits, InputBatch, StepInput
from services.worker.step import Int32Column, StepOutput
from services.worker.step_codec import parse_step, to_result

VOCABULARY = 1000

_States = npt.NDArray[np.uint64]

_MASK = 2**64 - 1
# States are 1 to 2**63 - 1. 0 is a cell that was never written, and from here on a cell is spoilt: behind the bit
# stands who spoilt it.
_SPOILT = 1 << 63


def chain(state: int, token_id: int) -> int:
    """The state of a prefix that is one token longer; that of the empty prefix is 0."""
    mixed = (state + token_id + 1) * 0x9E3779B97F4A7C15 & _MASK
    return (mixed ^ mixed >> 31) >> 1 | 1


def draw(attended: int, seed: int, position: int) -> int:
    """The token at `position`, behind cells whose states add up to `attended`."""
    mixed = ((attended ^ seed * 0xD1B54A32D192ED03) + position * 0x8CB92BA72F3D8DD7) & _MASK
    mixed = (mixed ^ mixed >> 32) * 0x9E3779B97F4A7C15 & _MASK
    return (mixed >> 33) % VOCABULARY


def expected_completion(prompt: list[int], seed: int, num_tokens: int) -> list[int]:
    """What an undisturbed worker generates."""
    state = attended = 0
    for token_id in prompt:
        state = chain(state, token_id)
        attended += state
    completion: list[int] = []
    for position in range(len(prompt), len(prompt) + num_tokens):
        token_id = draw(attended & _MASK, seed, position)
        state = chain(state, token_id)
        attended += state
        completion.append(token_id)
    return completion


class WorkerModel:
    """Holds a batch and KV cells for one epoch. A step that does not fit raises StepMismatchError.

    What a sequence computes may be spoilt: from a step on, all its cells are not finite, nor are the rows of sequences
    that read them. Sequences go by the numbers in which they entered, from 0.
    """

    def __init__(self, limits: BatchLimits, *, may_spoil: Callable[[], bool] = lambda: False) -> None:
        """Begin an epoch.

        Args:
            limits: What scheduler and worker agreed on.
            may_spoil: Asked for each sequence of each step whether its cells are spoilt from now on.
        """
        self.num_computed_tokens = 0
        # Of the last step: the slots of its rows, and for each that is not finite the sequence that spoilt it.
        self.last_rows: list[int] = []
        self.last_spoilers: list[int] = []
        self._block_size = limits.block_size
        self._may_spoil = may_spoil
        self._batch = InputBatch(limits)
        self._cells = np.zeros((limits.num_blocks, limits.block_size), np.uint64)
        self._num_entered = 0
        self._slot_to_number: dict[int, int] = {}
        self._spoilt_numbers: set[int] = set()

    def run(self, step: Step) -> StepResult:
        """Run a step of the scheduler's, there and back as messages."""
        return decode_result(self.answer(encode_step(step)))

    def answer(self, request: worker_pb2.StepRequest) -> worker_pb2.StepResult:
        """Apply a step's changes, compute it, and answer."""
        step = parse_step(request)
        inputs = self._batch.apply(step)
        for enter in step.enters:
            self._slot_to_number[enter.chunk.slot] = self._num_entered
            self._num_entered += 1
        chunk_slots = [chunk.slot for chunk in (*step.chunks, *(enter.chunk for enter in step.enters))]
        num_decodes = len(inputs.query_lens) - len(chunk_slots)
        slots = [*inputs.row_slots[:num_decodes].tolist(), *chunk_slots]
        tokens, not_finite_rows = self._forward(inputs, slots)
        self._batch.record_sampled(inputs.row_slots, tokens)
        self.last_rows = inputs.row_slots.tolist()
        self.num_computed_tokens += len(inputs.token_ids)
        return to_result(StepOutput(step.epoch, step.step_id, tokens, not_finite_rows, 0))

    def _forward(self, inputs: StepInput, slots: list[int]) -> tuple[Int32Column, Int32Column]:
        """Compute the sequences in `slots` one behind the other; returns the rows' tokens, and bad rows' numbers."""
        starts = inputs.cu_seqlens_q.tolist()
        lengths = inputs.context_lens.tolist()
        seeds = inputs.sampling.seed.tolist()
        rows = range(len(seeds)) if inputs.row_indexes is None else inputs.row_indexes.tolist()
        new_tokens = inputs.token_ids.tolist()
        states = [
            self._compute(
                slot, inputs.block_tables[index], lengths[index], new_tokens[starts[index] : starts[index + 1]]
            )
            for index, slot in enumerate(slots)
        ]
        tokens: list[int] = []
        not_finite_rows: list[int] = []
        self.last_spoilers = []
        for row, index in enumerate(rows):
            worst = int(states[index].max())
            if worst < _SPOILT:
                tokens.append(draw(int(states[index].sum()), seeds[row], lengths[index]))
                continue
            # It means nothing, but it is a token.
            tokens.append(0)
            not_finite_rows.append(row)
            self.last_spoilers.append(int(states[index][states[index] >= _SPOILT][0]) - _SPOILT)
        return np.array(tokens, np.int32), np.array(not_finite_rows, np.int32)

    def _compute(self, slot: int, block_table: Int32Column, length: int, new_tokens: list[int]) -> _States:
        """Write the cells of a sequence's newest tokens; returns the states of all its `length` cells, copied."""
        number = self._slot_to_number[slot]
        num_blocks = -(-length // self._block_size)
        states = self._cells[block_table[:num_blocks]].reshape(-1)[:length]
        num_known = length - len(new_tokens)
        assert states[:num_known].all(), "a cell is read that was never written in this epoch"
        state = int(states[num_known - 1]) if num_known else 0
        if self._may_spoil() or (num_known and int(states[:num_known].max()) >= _SPOILT):
            self._spoilt_numbers.add(number)
        for position, token_id in enumerate(new_tokens, num_known):
            state = _SPOILT + number if number in self._spoilt_numbers else chain(state, token_id)
            states[position] = state
            block, offset = divmod(position, self._block_size)
            self._cells[block_table[block], offset] = state
        return states
