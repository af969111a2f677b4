"""Which recurrent states a rank's steps may restore: those that a returned step saved after exactly these tokens."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.scheduler.core.batch.step import ScheduledBatch
from shared.step.step import StepResult
from tests.simulation.workload import RequestPlan, Salt

Text = tuple[Salt, list[int]]
"""A sequence's salt, and all tokens that it will have."""

_Content = tuple[Salt, list[int]] | None
"""A salt and all tokens that a state has taken in; None for tokens after a sequence's last one."""


@dataclass(slots=True)
class _Sent:
    """What a step in flight saves and restores."""

    saved: dict[int, _Content]
    """What checkpoints hold after it, as far as it is known before."""
    read: set[int]
    decoded: dict[int, int]
    """The row of each slot that is decoded."""
    saved_decodes: list[tuple[int, int, Text]]
    """Slot, checkpoint and text of decodes whose states are saved where a block ends."""
    checkpoints: list[int]
    """All of `state_saves`, in its order."""


class StateWatch:
    """Follows the checkpoints of one rank and one epoch, and raises AssertionError when one is misused."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_computed: dict[int, int] = {}
        # By checkpoint: what steps that have returned saved.
        self._saved: dict[int, _Content] = {}
        self._in_flight: deque[_Sent] = deque()

    def check_step(self, batch: ScheduledBatch, text_of: Callable[[int], Text]) -> None:
        """Check a step that the engine sends; `text_of` is asked by slot."""
        restores = dict(batch.state_restores)
        read = set(restores.values())
        for enter in batch.enters:
            slot, num_tokens = enter.chunk.slot, enter.num_cached_tokens
            self._num_computed[slot] = num_tokens
            if slot in restores:
                content = _content(text_of(slot), num_tokens)
                assert content is not None, "a state after the last token is restored"
                assert self._saved.get(restores.pop(slot)) == content, "a state that no step saved there is restored"
        assert not restores, "a state is restored into a slot that is not entered"
        for chunk in [*batch.chunks, *(enter.chunk for enter in batch.enters)]:
            self._num_computed[chunk.slot] += chunk.num_tokens
        decoded = {slot: row for row, slot in enumerate(batch.decode_slots.tolist())}
        checkpoints = [checkpoint for _, checkpoint in batch.state_saves]
        assert len(set(checkpoints)) == len(checkpoints), "two states are saved in one checkpoint"
        used = read.union(*(sent.read.union(sent.checkpoints) for sent in self._in_flight))
        assert used.isdisjoint(checkpoints), "a state that a step in flight saves or restores is overwritten"
        for checkpoint in checkpoints:
            self._saved.pop(checkpoint, None)
        prompts = [(slot, checkpoint) for slot, checkpoint in batch.state_saves if slot not in decoded]
        saved = {checkpoint: _content(text_of(slot), self._num_computed[slot]) for slot, checkpoint in prompts}
        decodes = [(slot, checkpoint, text_of(slot)) for slot, checkpoint in batch.state_saves if slot in decoded]
        self._in_flight.append(_Sent(saved, read, decoded, decodes, checkpoints))

    def is_coming(self, plan: RequestPlan) -> bool:
        """Whether a step in flight saves a state that a newcomer can continue."""
        # At least one token is left to compute.
        text = plan.salt, plan.prompt[:-1]
        return any(content is not None and content == _content(text, len(content[1])) for content in self._coming())

    def take_answer(self, result: StepResult) -> None:
        """Take in the answer to the oldest step in flight, which says how many tokens each decode took in."""
        sent, not_finite = self._in_flight.popleft(), set(result.not_finite_saves.tolist())
        before = {slot: self._num_computed[slot] for slot in sent.decoded}
        for slot, row in sent.decoded.items():
            self._num_computed[slot] += 1 if result.counts is None else int(result.counts[row])
        for slot, checkpoint, text in sent.saved_decodes:
            passed = self._num_computed[slot] // self._block_size * self._block_size
            if passed > before[slot]:
                sent.saved[checkpoint] = _content(text, passed)
        for index, checkpoint in enumerate(sent.checkpoints):
            if checkpoint in sent.saved and index not in not_finite:
                self._saved[checkpoint] = sent.saved[checkpoint]

    def _coming(self) -> Iterator[_Content]:
        """What the steps in flight save, as far as it is known; without drafts each decodes one token of a row."""
        num_decoded: Counter[int] = Counter()
        for sent in self._in_flight:
            num_decoded.update(sent.decoded.keys())
            yield from sent.saved.values()
            for slot, _, text in sent.saved_decodes:
                yield _content(text, self._num_computed[slot] + num_decoded[slot])


def _content(text: Text, num_tokens: int) -> _Content:
    salt, tokens = text
    return (salt, tokens[:num_tokens]) if num_tokens <= len(tokens) else None
