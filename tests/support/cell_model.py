"""A worker made of plain dictionaries, to run the engine against: what a worker must do with each step.

The token it draws depends on every token before it and on where its KV was written, so that a wrong block table,
a stale cache entry or an off-by-one replay changes the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from services.scheduler.batch import EnteringSequence, Step, StepKind, StepResult
from shared.limits import TOKEN_DTYPE

VOCABULARY = 1000


def chain(previous: int, token_id: int) -> int:
    """The state of a prefix that is one token longer."""
    return (previous * 1_000_003 + token_id + 1) % (2**61 - 1)


def draw(state: int, seed: int) -> int:
    """The token that follows a prefix."""
    return chain(state, seed) % VOCABULARY


def expected_completion(prompt: list[int], seed: int, num_tokens: int) -> list[int]:
    """What an undisturbed worker generates."""
    state = 0
    for token_id in prompt:
        state = chain(state, token_id)
    completion: list[int] = []
    for _ in range(num_tokens):
        completion.append(draw(state, seed))
        state = chain(state, completion[-1])
    return completion


@dataclass
class HeldSequence:
    """A sequence in the worker's batch."""

    blocks: list[int]
    num_computed: int
    last_token: int
    seed: int
    num_later: int


@dataclass
class WorkerModel:
    """Holds a batch and KV cells, one chained state a token."""

    block_size: int
    batch: dict[int, HeldSequence] = field(default_factory=dict)
    cells: dict[tuple[int, int], int] = field(default_factory=dict)
    num_computed_tokens: int = 0
    last_rows: list[int] = field(default_factory=list)

    def run(self, step: Step) -> StepResult:
        """Apply a step's changes in the protocol's order, compute it, and answer."""
        batch = step.batch
        for slot in batch.leave_slots:
            del self.batch[slot]
        decodes = [slot for slot, held in self.batch.items() if not held.num_later]
        if batch.skips_rows:
            decodes = batch.decode_slots.tolist()
        for entering in batch.enters:
            self._enter(entering)
        for slot, block in zip(batch.append_slots, batch.append_block_ids, strict=True):
            self.batch[slot].blocks.append(block)
        rows = decodes if batch.kind is not StepKind.PREFILL else []
        for slot in rows:
            self._compute(self.batch[slot], [self.batch[slot].last_token])
        for chunk in [*batch.chunks, *(entering.chunk for entering in batch.enters)]:
            held = self.batch[chunk.slot]
            self._compute(held, np.frombuffer(chunk.token_bytes, TOKEN_DTYPE).tolist())
            held.num_later = chunk.num_later_tokens
        rows += [chunk.slot for chunk in batch.chunks if not chunk.num_later_tokens]
        rows += [entering.chunk.slot for entering in batch.enters if not entering.chunk.num_later_tokens]
        tokens = list(self._draw(rows))
        self.last_rows = rows
        return StepResult(step.epoch, step.step_id, np.array(tokens, np.int32), np.empty(0, np.int32))

    def _enter(self, entering: EnteringSequence) -> None:
        slot = entering.chunk.slot
        assert slot not in self.batch, "a slot is entered twice"
        num_cached = entering.num_cached_tokens
        self.batch[slot] = HeldSequence(list(entering.block_ids), num_cached, 0, entering.params.seed, 1)

    def _compute(self, held: HeldSequence, tokens: list[int]) -> None:
        assert tokens, "nothing to compute"
        state = self._state(held, held.num_computed - 1) if held.num_computed else 0
        for token_id in tokens:
            state = chain(state, token_id)
            self.cells[self._cell(held, held.num_computed)] = state
            held.num_computed += 1
        self.num_computed_tokens += len(tokens)

    def _draw(self, rows: list[int]) -> Iterator[int]:
        for slot in rows:
            held = self.batch[slot]
            held.last_token = draw(self._state(held, held.num_computed - 1), held.seed)
            yield held.last_token

    def _state(self, held: HeldSequence, position: int) -> int:
        return self.cells[self._cell(held, position)]

    def _cell(self, held: HeldSequence, position: int) -> tuple[int, int]:
        return held.blocks[position // self.block_size], position % self.block_size
