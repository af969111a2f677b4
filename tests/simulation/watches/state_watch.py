"""Which recurrent states a rank's steps may restore: those that a returned step saved after exactly these tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from services.scheduler.core.batch.step import ScheduledBatch
from tests.simulation.workload import RequestPlan, Salt

Text = tuple[Salt, list[int]]
"""A sequence's salt, and all tokens that it will have."""

_Content = tuple[Salt, list[int]] | None
"""A salt and all tokens that a state has taken in; None for tokens after a sequence's last one."""


class StateWatch:
    """Follows the checkpoints of one rank and one epoch, and raises AssertionError when one is misused."""

    def __init__(self) -> None:
        self._num_computed: dict[int, int] = {}
        # By checkpoint: what steps that have returned saved; and for each step in flight, what it saves and restores.
        self._saved: dict[int, _Content] = {}
        self._in_flight: deque[tuple[dict[int, _Content], set[int]]] = deque()

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
        for slot in batch.decode_slots.tolist():
            self._num_computed[slot] += 1
        saves = {
            checkpoint: _content(text_of(slot), self._num_computed[slot]) for slot, checkpoint in batch.state_saves
        }
        used = read.union(*(restored.union(saved) for saved, restored in self._in_flight))
        assert used.isdisjoint(saves), "a state that a step in flight saves or restores is overwritten"
        for checkpoint in saves:
            self._saved.pop(checkpoint, None)
        self._in_flight.append((saves, read))

    def is_coming(self, plan: RequestPlan) -> bool:
        """Whether a step in flight saves a state that a newcomer can continue."""
        saved = [content for saves, _ in self._in_flight for content in saves.values()]
        # At least one token is left to compute.
        text = plan.salt, plan.prompt[:-1]
        return any(content is not None and content == _content(text, len(content[1])) for content in saved)

    def take_answer(self, not_finite_saves: Collection[int]) -> None:
        """Take in the answer to the oldest step in flight."""
        saves, _ = self._in_flight.popleft()
        for index, (checkpoint, content) in enumerate(saves.items()):
            if index not in not_finite_saves:
                self._saved[checkpoint] = content


def _content(text: Text, num_tokens: int) -> _Content:
    salt, tokens = text
    return (salt, tokens[:num_tokens]) if num_tokens <= len(tokens) else None
