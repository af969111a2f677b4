"""The same runner without services: a plain loop that knows every answer's length from the start."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from services.worker.runner.model_runner import ModelRunner
from services.worker.runner.steps.pending_step import PendingStep
from shared.step.step import EnteringSequence, Step
from tests.bench.gpu.runners import BLOCK_SIZE, without_waiting
from tests.bench.gpu.serving.requests import Request
from tests.support.worker.worker_steps import decode_step, make_enter, prefill_step


class PlainLoop:
    """Prefill first, as the scheduler plans; each step is launched before the one before it has returned.

    A sequence gets the blocks of its whole length at once, so none is ever preempted.
    """

    def __init__(self, runner: ModelRunner, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """`runner` was attached with these limits."""
        self._runner = runner
        self._most_tokens = max_num_batched_tokens
        self._free_slots = list(range(max_num_seqs))
        self._free_blocks = list(range(runner.num_blocks))
        self._slot_to_blocks: dict[int, list[int]] = {}
        self._slot_to_left: dict[int, int] = {}
        """Tokens that a running sequence has yet to get."""
        self._ended: list[int] = []
        """Slots of sequences that leave with the next step."""

    def serve(self, requests: Sequence[Request]) -> int:
        """Compute all answers; returns how many tokens they have together.

        Raises:
            ValueError: a request can never run.
        """
        waiting, pending = deque(requests), deque[PendingStep]()
        num_tokens = 0
        while waiting or self._slot_to_left or pending:
            if waiting or self._slot_to_left:
                pending.append(self._launch(self._next_step(waiting)))
            if len(pending) > 1 or not (waiting or self._slot_to_left):
                num_tokens += len(pending.popleft().finish().token_ids)
        return num_tokens

    def _next_step(self, waiting: deque[Request]) -> Step:
        leave = self._release()
        entering = self._admit(waiting)
        if not entering and not self._slot_to_left:
            raise ValueError(f"a request of {waiting[0].num_tokens} tokens does not fit")
        step = prefill_step(*entering, leave=leave) if entering else decode_step(leave=leave)
        for slot in [enter.chunk.slot for enter in entering] if entering else list(self._slot_to_left):
            self._slot_to_left[slot] -= 1
            if not self._slot_to_left[slot]:
                del self._slot_to_left[slot]
                self._ended.append(slot)
        return step

    def _release(self) -> list[int]:
        """Free what ended sequences have: the device computes in order, so the next step may reuse it."""
        leave, self._ended = self._ended, []
        for slot in leave:
            self._free_blocks += self._slot_to_blocks.pop(slot)
            self._free_slots.append(slot)
        return leave

    def _admit(self, waiting: deque[Request]) -> list[EnteringSequence]:
        entering: list[EnteringSequence] = []
        num_tokens = 0
        while waiting and self._free_slots:
            request = waiting[0]
            num_blocks = -(-request.num_tokens // BLOCK_SIZE)
            num_tokens += len(request.prompt)
            if num_tokens > self._most_tokens or num_blocks > len(self._free_blocks):
                break
            waiting.popleft()
            slot = self._free_slots.pop()
            blocks = self._slot_to_blocks[slot] = [self._free_blocks.pop() for _ in range(num_blocks)]
            self._slot_to_left[slot] = request.num_output_tokens
            entering.append(make_enter(slot, request.prompt, blocks, max_num_tokens=request.num_tokens))
        return entering

    def _launch(self, step: Step) -> PendingStep:
        with without_waiting(self._runner.device):
            return self._runner.launch(step)
