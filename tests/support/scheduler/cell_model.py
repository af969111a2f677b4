"""A worker whose model is a hash: real messages and the worker's real batch code, with one array as the device.

A KV cell holds the chained hash of the tokens up to its own. The sampled token depends on the seed, the position and
every cell of the sequence, so that a wrong block table, a stale cache entry, a block reused too early or an off-by-one
replay changes the output:

    token ids   5        9        2
    cells       h(0,5)   h(.,9)   h(.,2)                  each chained to the cell before it
    next token  hash(sum of cells, seed, position) mod VOCABULARY
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from lockstep.internal.v1 import worker_pb2
from services.scheduler.core.batch.step import Step
from services.worker.batch.decodes import DraftRoom, Drafts
from services.worker.batch.enter_checks import BatchLimits
from services.worker.batch.input_batch import InputBatch
from services.worker.batch.step_input import StepInput
from services.worker.drafts.drafter import Drafter
from services.worker.drafts.ngram_drafts import LookupProposer
from services.worker.sampling.sampling_rows import SamplingRows
from services.worker.sampling.sampling_state import SamplingState
from shared.step.codec import encode_result, encode_step, parse_result, parse_step
from shared.step.columns import Int32Column
from shared.step.logprobs import Logprobs
from shared.step.step import Step as ParsedStep
from shared.step.step import StepResult

VOCABULARY = 1000

_States = npt.NDArray[np.uint64]

_MASK = 2**64 - 1
# States are 1 to 2**63 - 1; 0 is a cell that was never written. From this value on a cell is spoilt (not finite), and
# the lower bits hold the number of the sequence that spoilt it.
_SPOILT = 1 << 63


def chain(state: int, token_id: int) -> int:
    """The state of a prefix extended by one token; the state of the empty prefix is 0."""
    mixed = (state + token_id + 1) * 0x9E3779B97F4A7C15 & _MASK
    return (mixed ^ mixed >> 31) >> 1 | 1


def draw(attended: int, seed: int, position: int) -> int:
    """The token at `position`, after cells whose states add up to `attended`."""
    mixed = ((attended ^ seed * 0xD1B54A32D192ED03) + position * 0x8CB92BA72F3D8DD7) & _MASK
    mixed = (mixed ^ mixed >> 32) * 0x9E3779B97F4A7C15 & _MASK
    return (mixed >> 33) % VOCABULARY


def noise_of(seed: int, choice: int) -> int:
    """The seed of one choice; choice 0 uses the request's seed itself."""
    return (seed + choice * 0xA24BAED4963EE407) & _MASK


class HashGrammar:
    """Plays a worker's grammar matcher: all tokens so far determine which half of the vocabulary may come next.

    Its text is the number of tokens after which it fails.
    """

    def __init__(self, text: str) -> None:
        self.has_failed = False
        self._fails_after = int(text)
        self._num_tokens = 0
        self._state = 0

    def mask(self) -> npt.NDArray[np.bool_]:
        """The tokens that may come next."""
        self.has_failed = self._num_tokens >= self._fails_after
        is_allowed: npt.NDArray[np.bool_] = np.arange(VOCABULARY) % 2 == self._state % 2
        return is_allowed

    def advance(self, token_id: int) -> None:
        """Advance by the completion's next token."""
        assert token_id % 2 == self._state % 2, "a token that the grammar does not allow"
        self._num_tokens += 1
        self._state = chain(self._state, token_id) >> 1

    def prepare(self) -> None:
        """Do nothing: this matcher has no slow preparation."""

    def nearest(self, token_id: int) -> int:
        """The token sampled under the grammar where this one would be sampled without."""
        return token_id if token_id % 2 == self._state % 2 else (token_id + 1) % VOCABULARY


def expected_completion(
    prompt: list[int], seed: int, num_tokens: int, choice: int = 0, *, grammar: HashGrammar | None = None
) -> list[int]:
    """The completion that an undisturbed worker generates; `grammar` must be fresh."""
    seed = noise_of(seed, choice)
    state = attended = 0
    for token_id in prompt:
        state = chain(state, token_id)
        attended += state
    completion: list[int] = []
    for position in range(len(prompt), len(prompt) + num_tokens):
        token_id = draw(attended & _MASK, seed, position)
        if grammar is not None:
            token_id = grammar.nearest(token_id)
            grammar.advance(token_id)
        state = chain(state, token_id)
        attended += state
        completion.append(token_id)
    return completion


def _draw_run(states: _States, seed: int, drafts: list[int], sampling: SamplingState | None) -> tuple[list[int], bool]:
    """Sample a row's tokens: one after each accepted draft, and one more. The row's last cells are those of its drafts.

    Returns:
        The tokens, and False if the row's grammar failed at the last of them.
    """
    num_cells = len(states) - len(drafts)
    run: list[int] = []
    for draft in [*drafts, None]:
        token_id = draw(int(states[:num_cells].sum()), seed, num_cells)
        if sampling is not None and sampling.options.grammar:
            token_id = _nearest_allowed(token_id, sampling, num_cells)
            has_failed = sampling.has_failed
            sampling.append(token_id)
            if has_failed:
                return [*run, token_id], False
        run.append(token_id)
        if token_id != draft:
            break
        num_cells += 1
    return run, True


def _nearest_allowed(token_id: int, sampling: SamplingState, position: int) -> int:
    """The first allowed token from `token_id` on, wrapping around the vocabulary."""
    logits = -((np.arange(VOCABULARY) - token_id) % VOCABULARY).astype(np.float32)
    return int(sampling.process(logits, position).argmax())


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: (token, value) entries, and the ranks of the own and the requested ones."""

    position: int
    ranks: tuple[int, ...]
    entries: tuple[tuple[int, float], ...]


def logprobs_of(token_id: int, position: int, num_top: int, requested: Sequence[int] = ()) -> TokenLogprobs:
    """The log-probabilities of a token at an absolute position; they differ for every token and position."""
    mixed = chain(position + 1, token_id)
    entries = [(token_id, -(mixed % 4096) / 64)]
    entries += [(other, -((mixed ^ other) % 4096) / 32) for other in requested]
    ranks = (1 + mixed % VOCABULARY, *(1 + (mixed ^ other) % VOCABULARY for other in requested))
    # Values that float32 represents exactly, so that they survive encoding.
    entries += [
        ((mixed >> 7 * index) % VOCABULARY, -(mixed >> 5 * index & 0xFFF) / 128) for index in range(1, num_top + 1)
    ]
    return TokenLogprobs(position, ranks, tuple(entries))


def _row_logprobs(rows: SamplingRows, runs: list[list[int]], not_finite_rows: list[int]) -> Logprobs | None:
    """The log-probabilities of the tokens in finite rows that request them."""
    logprobs: list[TokenLogprobs] = []
    indexes: list[int] = []
    start = 0
    for row, run in enumerate(runs):
        state = rows.states.get(row)
        num_top = None if state is None or row in not_finite_rows else state.options.num_top
        if state is not None and num_top is not None:
            positions, requested = enumerate(run, int(rows.position[row])), state.options.logprob_token_ids
            logprobs += [logprobs_of(token_id, position, num_top, requested) for position, token_id in positions]
            indexes += range(start, start + len(run))
        start += len(run)
    return _to_columns(logprobs, indexes) if logprobs else None


def _prompt_logprobs(inputs: StepInput, token_ids: npt.NDArray[np.int64]) -> tuple[tuple[int, Logprobs], ...]:
    """The log-probabilities of the chunks' own tokens, without the prompt's first token."""
    by_slot = []
    for chunk in inputs.scored_chunks:
        tokens = token_ids[chunk.first_token : chunk.first_token + chunk.num_tokens].tolist()
        logprobs = [
            logprobs_of(token_id, position, chunk.num_top)
            for position, token_id in enumerate(tokens, chunk.position)
            if position
        ]
        if logprobs:
            by_slot.append((chunk.slot, _to_columns(logprobs, [one.position for one in logprobs])))
    return tuple(by_slot)


def _to_columns(logprobs: list[TokenLogprobs], indexes: list[int]) -> Logprobs:
    entries = [entry for one in logprobs for entry in one.entries]
    requested_counts = np.array([len(one.ranks) - 1 for one in logprobs], np.int32)
    return Logprobs(
        np.array(indexes, np.int32),
        np.array([rank for one in logprobs for rank in one.ranks], np.int32),
        np.array([len(one.entries) for one in logprobs], np.int32),
        np.array([token_id for token_id, _ in entries], np.int32),
        np.array([value for _, value in entries], np.float32),
        requested_counts if requested_counts.any() else None,
    )


class Oracle(LookupProposer):
    """Drafts the tokens of the completions it has learnt.

    Sequences are identified by their newest token and its position. If two share both, the one learnt last wins and the
    drafts of the other are wrong.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}

    def learn_answer(self, prompt: list[int], completion: list[int]) -> None:
        """Learn the answer of a request."""
        tokens = [*prompt, *completion]
        for position in range(len(prompt) - 1, len(tokens) - 1):
            self._next[position, tokens[position]] = tokens[position + 1]

    @override
    def look_up(self, token_ids: Int32Column, max_tokens: int) -> Int32Column:
        last, token_id = len(token_ids) - 1, int(token_ids[-1])
        drafts: list[int] = []
        while len(drafts) < max_tokens and (last + len(drafts), token_id) in self._next:
            token_id = self._next[last + len(drafts), token_id]
            drafts.append(token_id)
        return np.array(drafts, np.int32)


class FallibleOracle(Oracle):
    """Drafts a random number of tokens, of which only a share is right."""

    def __init__(self, rng: Random, *, share_right: float) -> None:
        """Start without knowledge; each known draft is right with probability `share_right`."""
        super().__init__()
        self._rng = rng
        self._share_right = share_right

    @override
    def look_up(self, token_ids: Int32Column, max_tokens: int) -> Int32Column:
        num_drafts = self._rng.randint(0, max_tokens)
        drafts = np.array([self._rng.randrange(VOCABULARY) for _ in range(num_drafts)], np.int32)
        known = super().look_up(token_ids, num_drafts)
        is_right = np.array([self._rng.random() < self._share_right for _ in range(len(known))], bool)
        drafts[: len(known)][is_right] = known[is_right]
        return drafts


class EagerDrafter(Drafter):
    """Always drafts the most tokens allowed, whatever the acceptance rate."""

    def __init__(self, proposer: LookupProposer, num_draft_tokens: int) -> None:
        super().__init__(proposer, num_draft_tokens)
        self._lookup = proposer
        self._known: dict[int, list[int]] = {}

    @override
    def enter(self, slot: int, token_ids: Int32Column, max_num_tokens: int) -> None:
        self._known[slot] = token_ids.tolist()

    @override
    def extend(self, slot: int, token_ids: Int32Column) -> None:
        self._known[slot] += token_ids.tolist()

    @override
    def leave(self, slots: Int32Column) -> None:
        for slot in slots.tolist():
            del self._known[slot]

    @override
    def propose(self, room: DraftRoom) -> Drafts:
        token_ids: list[int] = []
        counts: list[int] = []
        for slot, max_tokens in zip(room.slots.tolist(), room.most.tolist(), strict=True):
            num_left = min(max_tokens, self._num_draft_tokens, room.most_together - len(token_ids))
            guess = self._lookup.look_up(np.array(self._known[slot], np.int32), num_left).tolist() if num_left else []
            token_ids += guess
            counts.append(len(guess))
        return Drafts(np.array(token_ids, np.int32), np.array(counts, np.int32))

    @override
    def record(
        self,
        slots: Int32Column,
        token_ids: Int32Column,
        counts: Int32Column | None,
        draft_counts: Int32Column | None,
    ) -> None:
        tokens = iter(token_ids.tolist())
        for slot, count in zip(slots.tolist(), [1] * len(slots) if counts is None else counts.tolist(), strict=True):
            self._known[slot] += islice(tokens, count)


class PoisonedError(Exception):
    """A step computes a poisoned token, which kills the process."""


class WorkerModel:
    """Holds a batch and KV cells for one epoch. An inconsistent step raises StepMismatchError.

    A sequence may be spoilt: from some step on, none of its cells is finite, nor are rows of sequences that read those
    cells. Sequences are numbered in the order in which they entered, from 0.
    """

    def __init__(
        self,
        limits: BatchLimits,
        *,
        may_spoil: Callable[[], bool] = lambda: False,
        proposer: LookupProposer | None = None,
        num_draft_tokens: int = 0,
        poison: Mapping[int, int] | None = None,
    ) -> None:
        """Begin an epoch.

        Args:
            limits: The batch limits agreed by scheduler and worker.
            may_spoil: Called for each sequence of each step; True spoils its cells from then on.
            proposer: Drafts tokens if `num_draft_tokens` is positive.
            num_draft_tokens: The most drafts per row.
            poison: The position whose computation raises PoisonedError, by a request's seed; may be changed later.
        """
        self.num_computed_tokens = 0
        # Tokens of the last step, including the one token of a dummy.
        self.last_num_tokens = 0
        # Row number to slot in the last step, without rows of sequences that already have all their tokens; and for
        # each row that is not finite the sequence that spoilt it.
        self.last_rows: dict[int, int] = {}
        self.last_spoilers: list[int] = []
        self._block_size = limits.block_size
        self._may_spoil = may_spoil
        self._poison = {} if poison is None else poison
        drafter = EagerDrafter(proposer, num_draft_tokens) if proposer and num_draft_tokens else None
        self._drafts = drafter is not None
        self._batch = InputBatch(limits, make_matcher=HashGrammar, drafter=drafter)
        self._cells = np.zeros((limits.num_blocks, limits.block_size), np.uint64)
        self._last_token = np.zeros(limits.max_num_seqs, np.int64)
        # The live states by slot, then the checkpoints; like a cell, each stands for all tokens that it has taken in.
        num_states = 0 if limits.num_checkpoints is None else limits.num_live_states + limits.num_checkpoints
        self._states = np.zeros(num_states, np.uint64)
        self._num_live = limits.num_live_states
        # By slot, for the rows of the last step that passed a block's end: the state there.
        self._passed_states: dict[int, int] = {}
        self._num_entered = 0
        self._slot_to_number: dict[int, int] = {}
        self._slot_to_seed: dict[int, int] = {}
        self._spoilt_numbers: set[int] = set()

    def run(self, step: Step) -> StepResult:
        """Run a step of the scheduler, encoding and decoding both messages."""
        return parse_result(self.answer(encode_step(step)))

    def answer(self, request: worker_pb2.StepRequest) -> worker_pb2.StepResult:
        """Apply a step's batch changes, compute it, and return its result."""
        step = parse_step(request)
        inputs = self._batch.apply(step)
        for slot, seed in zip(step.enters.slots.tolist(), step.enters.sampled["seed"].tolist(), strict=True):
            self._slot_to_number[slot] = self._num_entered
            self._slot_to_seed[slot] = seed
            self._num_entered += 1
        self._restore_states(step)
        if step.is_dummy:
            # A dummy belongs to no sequence; if it writes a cell, any sequence that reads the cell goes wrong.
            slot_mapping = inputs.arrays["slot_mapping"]
            self._cells.reshape(-1)[slot_mapping[slot_mapping >= 0]] = chain(0, 0)
        self._name_last_tokens(inputs)
        rows = self._batch.sampling(inputs)
        runs, not_finite_rows, failed_grammar_rows = self._forward(inputs, rows)
        not_finite_saves = self._save_states(step, inputs)
        tokens = np.array([token_id for run in runs for token_id in run], np.int32)
        self._last_token[inputs.row_slots] = [run[-1] for run in runs]
        self._batch.record_sampled(inputs.row_slots, tokens, np.array([len(run) for run in runs], np.int32))
        numbers = range(len(runs)) if inputs.row_numbers is None else inputs.row_numbers.tolist()
        self.last_rows = dict(zip(numbers, inputs.row_slots.tolist(), strict=True))
        self.last_num_tokens = inputs.num_tokens
        self.num_computed_tokens += self.last_num_tokens
        counts = np.zeros(inputs.num_result_rows, np.int32)
        counts[list(numbers)] = [len(run) for run in runs]
        return encode_result(
            StepResult(
                step.epoch,
                step.step_id,
                tokens,
                np.array([numbers[row] for row in not_finite_rows], np.int32),
                0,
                counts=None if (counts == 1).all() else counts,
                num_draft_tokens=len(inputs.runs.drafted()),
                logprobs=_row_logprobs(rows, runs, not_finite_rows),
                prompt_logprobs=_prompt_logprobs(inputs, inputs.arrays["token_ids"]),
                failed_grammar_rows=np.array([numbers[row] for row in failed_grammar_rows], np.int32),
                not_finite_saves=np.array(not_finite_saves, np.int32),
            )
        )

    def _restore_states(self, step: ParsedStep) -> None:
        """Clear or restore the live states of the sequences that enter."""
        assert self._states.size or not len(step.state_restores), "a checkpoint for a model without state"
        restores = dict(step.state_restores.tolist())
        assert len(restores) == len(step.state_restores), "two checkpoints for one slot"
        enters = zip(step.enters.slots.tolist(), step.enters.num_cached_tokens.tolist(), strict=True)
        for slot, num_cached_tokens in enters if self._states.size else ():
            checkpoint = restores.pop(slot, None)
            assert (checkpoint is not None) == (num_cached_tokens > 0), "a prefix without its state"
            self._states[slot] = 0 if checkpoint is None else self._states[self._num_live + checkpoint]
        assert not restores, "a checkpoint for a slot that is not entered"

    def _save_states(self, step: ParsedStep, inputs: StepInput) -> list[int]:
        """Copy live states into checkpoints; returns the indexes of those that are not finite.

        With drafts, that of a decode is the one where the last block ended in this step, if one did.
        """
        assert self._states.size or not len(step.state_saves), "a checkpoint of a model without state"
        checkpoints = step.state_saves[:, 1].tolist()
        assert len(set(checkpoints)) == len(checkpoints), "two states for one checkpoint"
        chunks = set(inputs.slots[inputs.num_decodes :].tolist())
        not_finite = []
        for index, (slot, checkpoint) in enumerate(step.state_saves.tolist()):
            state: int | None = int(self._states[slot])
            if self._drafts and slot not in chunks:
                state = self._passed_states.get(slot)
            if state is not None:
                self._states[self._num_live + checkpoint] = state
                not_finite += [index] if state >= _SPOILT else []
        return not_finite

    def _name_last_tokens(self, inputs: StepInput) -> None:
        """Put in the tokens that only a worker's device knows."""
        slots = inputs.slots[: inputs.num_decodes]
        # A dummy has no slot.
        inputs.arrays["token_ids"][inputs.cu_seqlens_q[: len(slots)]] = self._last_token[slots]

    def _forward(self, inputs: StepInput, sampling: SamplingRows) -> tuple[list[list[int]], list[int], list[int]]:
        """Compute the sequences one after the other.

        Returns:
            The rows' tokens, the rows that are not finite, and the rows with failed grammars.
        """
        starts = inputs.cu_seqlens_q.tolist()
        lengths = inputs.context_lens.tolist()
        seeds = list(map(noise_of, sampling.seed.tolist(), sampling.choice.tolist()))
        rows = range(len(seeds)) if inputs.row_indexes is None else inputs.row_indexes.tolist()
        new_tokens = inputs.arrays["token_ids"].tolist()
        states = [
            self._compute(
                slot,
                inputs.arrays["block_tables"][index],
                lengths[index],
                new_tokens[starts[index] : starts[index + 1]],
            )
            for index, slot in enumerate(inputs.slots.tolist())
        ]
        runs: list[list[int]] = []
        not_finite_rows: list[int] = []
        failed_grammar_rows: list[int] = []
        self.last_spoilers = []
        self._passed_states = {}
        drafts = iter(inputs.runs.wanted[inputs.runs.drafted()].tolist())
        counts = inputs.draft_counts
        for row, index in enumerate(rows):
            its_drafts = list(islice(drafts, 0 if counts is None else int(counts[row])))
            worst = int(states[index].max())
            if worst < _SPOILT:
                run, is_followed = _draw_run(states[index], seeds[row], its_drafts, sampling.states.get(row))
                runs.append(run)
                self._take_in(int(inputs.slots[index]), states[index], len(its_drafts), len(run) - 1)
                failed_grammar_rows += [] if is_followed else [row]
                continue
            # A placeholder: a row always returns at least one token.
            runs.append([0])
            not_finite_rows.append(row)
            self.last_spoilers.append(int(states[index][states[index] >= _SPOILT][0]) - _SPOILT)
        return runs, not_finite_rows, failed_grammar_rows

    def _take_in(self, slot: int, cells: _States, num_drafts: int, num_accepted: int) -> None:
        """Let the live state of a row take in the drafts that were accepted, of those that its last cells are of."""
        if not self._states.size:
            return
        before = len(cells) - num_drafts - 1
        now = before + 1 + num_accepted
        self._states[slot] = cells[now - 1]
        passed = now // self._block_size * self._block_size
        if passed > before:
            self._passed_states[slot] = int(cells[passed - 1])

    def _compute(self, slot: int, block_table: Int32Column, length: int, new_tokens: list[int]) -> _States:
        """Write the cells of a sequence's newest tokens; returns a copy of the states of all its `length` cells."""
        number = self._slot_to_number[slot]
        num_blocks = -(-length // self._block_size)
        states = self._cells[block_table[:num_blocks]].reshape(-1)[:length]
        num_known = length - len(new_tokens)
        if num_known <= self._poison.get(self._slot_to_seed[slot], -1) < length:
            raise PoisonedError
        assert states[:num_known].all(), "a step reads a cell that was never written in this epoch"
        state = int(states[num_known - 1]) if num_known else 0
        if self._states.size:
            state = int(self._states[slot])
            if state >= _SPOILT:
                self._spoilt_numbers.add(number)
        if self._may_spoil() or (num_known and int(states[:num_known].max()) >= _SPOILT):
            self._spoilt_numbers.add(number)
        for position, token_id in enumerate(new_tokens, num_known):
            state = _SPOILT + number if number in self._spoilt_numbers else chain(state, token_id)
            states[position] = state
            block, offset = divmod(position, self._block_size)
            self._cells[block_table[block], offset] = state
        if self._states.size:
            self._states[slot] = state
        return states
