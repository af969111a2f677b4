"""Drives a model runner as a scheduler would: chunked prompts, skipped rows, results read one step late.

The contents of steps are drawn from a seed; the generated tokens must not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from services.worker.runner.model_runner import ModelRunner
from services.worker.runner.steps.pending_step import PendingStep
from shared.request.sampling_params import SamplingOptions, SamplingParams
from shared.step.logprobs import Logprobs
from shared.step.step import EnteringSequence, PrefillChunk, Step, StepKind, StepResult
from tests.support.worker.worker_steps import EPOCH, column, make_chunk, pack, to_columns

# By position: the token's rank, and the tokens and values of its entries.
Scores = dict[int, tuple[list[int], list[int], list[float]]]


@dataclass(frozen=True)
class Request:
    """A sequence to generate. Some tokens of its completion may be known from an earlier attempt."""

    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    choice: int = 0
    options: SamplingOptions | None = None
    stop_token_ids: tuple[int, ...] = ()
    known: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """The tokens present before the first one is sampled."""
        return [*self.prompt, *self.known]


@dataclass
class Answer:
    """A completion; log-probabilities are keyed by token index, or by position in the prompt."""

    tokens: list[int]
    logprobs: Scores = field(default_factory=dict)
    prompt_logprobs: Scores = field(default_factory=dict)


@dataclass(eq=False)
class _Sequence:
    request: Request
    answer: Answer
    slot: int
    block_ids: list[int]
    num_sent: int = 0
    """How many of the request's initial tokens were sent."""
    num_in_flight: int = 0
    """Steps in flight that return tokens of it."""

    @property
    def is_complete(self) -> bool:
        return self.num_sent == len(self.request.tokens)

    @property
    def max_num_tokens(self) -> int:
        return len(self.request.prompt) + self.request.max_tokens

    @property
    def num_known(self) -> int:
        return len(self.request.prompt) + len(self.answer.tokens)


@dataclass(frozen=True)
class _Launched:
    """A launched step and the sequences of its rows."""

    pending: PendingStep
    rows: list[_Sequence]


class WorkerDriver:
    """Attaches a runner and runs requests to their end."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        seed: int = 0,
        block_size: int = 4,
        max_num_batched_tokens: int = 1024,
        max_chunk: int = 32,
    ) -> None:
        """Begin an epoch whose steps are drawn from `seed`; prompt chunks have 1 to `max_chunk` tokens."""
        runner.attach(block_size=block_size, max_num_seqs=16, max_num_batched_tokens=max_num_batched_tokens)
        self.outputs: list[StepResult] = []
        self._runner = runner
        self._rng = Random(seed)
        self._block_size = block_size
        self._max_chunk = max_chunk
        self._free_slots = list(range(16))
        self._free_blocks = list(range(runner.num_blocks))
        self._rng.shuffle(self._free_blocks)
        self._sequences: list[_Sequence] = []
        self._ended: list[_Sequence] = []

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Run the requests until each has `max_tokens`."""
        answers = [Answer(list(request.known)) for request in requests]
        waiting = list(zip(requests, answers, strict=True))
        ahead: _Launched | None = None
        while waiting or self._sequences:
            num_entering = self._rng.randint(0, min(len(waiting), len(self._free_slots)))
            entering = [self._admit(*pair) for pair in waiting[:num_entering]]
            waiting = waiting[num_entering:]
            # Launch each step before the result of the previous one is known.
            launched = self._launch(entering)
            if ahead is not None:
                self._finish(ahead)
            ahead = launched
        if ahead is not None:
            self._finish(ahead)
        return answers

    def _admit(self, request: Request, answer: Answer) -> _Sequence:
        num_blocks = -(-len(request.tokens) // self._block_size)
        blocks = [self._free_blocks.pop() for _ in range(num_blocks)]
        return _Sequence(request, answer, self._free_slots.pop(0), blocks)

    def _launch(self, entering: list[_Sequence]) -> _Launched | None:
        """Plan and launch the next step; None if there is nothing to compute."""
        decodes = [seq for seq in self._sequences if self._may_decode(seq) and self._rng.random() < 0.9]
        begun = [seq for seq in self._sequences if not seq.is_complete and self._rng.random() < 0.7]
        if not (decodes or begun or entering):
            return None
        append = [(seq.slot, block_id) for seq in decodes for block_id in self._new_blocks(seq)]
        leaving, self._ended = self._ended, []
        step = Step(
            epoch=EPOCH,
            step_id=1,
            kind=_kind(decodes=bool(decodes), prompts=bool(begun or entering)),
            leave_slots=column([seq.slot for seq in leaving]),
            append_slots=column([slot for slot, _ in append]),
            append_block_ids=column([block_id for _, block_id in append]),
            decode_slots=column([seq.slot for seq in decodes]) if decodes else None,
            **to_columns([self._enter(seq) for seq in entering], [self._chunk(seq) for seq in begun]),
        )
        # These slots may be reused from the next step on.
        self._free_slots += [seq.slot for seq in leaving]
        self._free_blocks += [block_id for seq in leaving for block_id in seq.block_ids]
        self._sequences += entering
        rows = [*decodes, *(seq for seq in (*begun, *entering) if seq.is_complete)]
        for seq in rows:
            seq.num_in_flight += 1
        return _Launched(self._runner.launch(step), rows)

    def _may_decode(self, seq: _Sequence) -> bool:
        # Each step in flight returns at least one token; whether it returns more is known only after reading it.
        return seq.is_complete and seq.num_known + seq.num_in_flight < seq.max_num_tokens

    def _new_blocks(self, seq: _Sequence) -> list[int]:
        """Allocate blocks for all tokens that the steps in flight and the next one may return."""
        most = seq.num_known + (seq.num_in_flight + 1) * (1 + self._runner.num_draft_tokens)
        num_blocks = -(-min(most, seq.max_num_tokens) // self._block_size)
        new = [self._free_blocks.pop() for _ in range(num_blocks - len(seq.block_ids))]
        seq.block_ids += new
        return new

    def _enter(self, seq: _Sequence) -> EnteringSequence:
        request = seq.request
        return EnteringSequence(
            chunk=self._chunk(seq),
            num_cached_tokens=0,
            num_prompt_tokens=len(request.prompt),
            block_bytes=pack(seq.block_ids),
            params=SamplingParams(
                seq.max_num_tokens - len(request.prompt),
                request.temperature,
                request.top_k,
                request.top_p,
                request.seed,
                options=request.options,
            ),
            choice=request.choice,
            stop_token_ids=tuple(request.stop_token_ids),
        )

    def _chunk(self, seq: _Sequence) -> PrefillChunk:
        tokens = seq.request.tokens
        size = self._rng.randint(1, min(self._max_chunk, len(tokens) - seq.num_sent))
        chunk = tokens[seq.num_sent : seq.num_sent + size]
        seq.num_sent += size
        return make_chunk(seq.slot, chunk, len(tokens) - seq.num_sent)

    def _finish(self, launched: _Launched) -> None:
        output = launched.pending.finish()
        self.outputs.append(output)
        counts = [1] * len(launched.rows) if output.counts is None else output.counts.tolist()
        slot_to_sequence = {seq.slot: seq for seq in (*self._ended, *self._sequences)}
        for slot, logprobs in output.prompt_logprobs:
            scores = slot_to_sequence[slot].answer.prompt_logprobs
            assert not scores.keys() & set(logprobs.indexes.tolist()), "a position was scored twice"
            scores.update(scores_of(logprobs))
        flat_scores = {} if output.logprobs is None else scores_of(output.logprobs)
        start = 0
        for seq, count in zip(launched.rows, counts, strict=True):
            answer = seq.answer
            for place in range(start, start + count):
                if place in flat_scores:
                    answer.logprobs[len(answer.tokens)] = flat_scores[place]
                answer.tokens.append(int(output.token_ids[place]))
            start += count
            seq.num_in_flight -= 1
            assert seq.num_known <= seq.max_num_tokens, "more tokens than requested"
            if seq.num_known == seq.max_num_tokens and seq in self._sequences:
                self._sequences.remove(seq)
                self._ended.append(seq)
        assert start == len(output.token_ids)


def scores_of(logprobs: Logprobs) -> Scores:
    """Index log-probabilities by position."""
    ends, requested = np.cumsum(logprobs.counts)[:-1], logprobs.requested_counts
    rank_ends = np.arange(1, len(ends) + 1) + (0 if requested is None else np.cumsum(requested)[:-1])
    columns = np.split(logprobs.ranks, rank_ends), np.split(logprobs.token_ids, ends), np.split(logprobs.values, ends)
    return {
        index: (ranks.tolist(), token_ids.tolist(), values.tolist())
        for index, ranks, token_ids, values in zip(logprobs.indexes.tolist(), *columns, strict=True)
    }


def _kind(*, decodes: bool, prompts: bool) -> StepKind:
    if not prompts:
        return StepKind.DECODE
    return StepKind.MIXED if decodes else StepKind.PREFILL
