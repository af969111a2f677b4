"""Recurrent states are restored only where exactly their tokens were saved, by a step that has returned.

Elsewhere there were prefix hits whose state was never saved.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduler.core.batch.sequence import Sequence
from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.cache.eviction_order import EvictionOrder
from services.scheduler.core.cache.free_blocks import MAX_TURNOVERS
from shared.request.limits import TOKEN_DTYPE
from shared.tenants.tenant import DEFAULT_TENANT, Tenant
from tests.support.scheduler.core import make_sequence

BLOCK_SIZE = 2
PROMPT = list(range(20, 32))
FINITE = np.empty(0, np.int32)
TEXTS = [[1] * 9, [1, 1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 1, 1, 0, 0, 1]]


def make_blocks(num_checkpoints: int, *, num_blocks: int = 16) -> BlockManager:
    return BlockManager(num_blocks, BLOCK_SIZE, num_checkpoints=num_checkpoints)


def tokens_of(seq: Sequence, num_tokens: int | None = None) -> tuple[int, ...]:
    return tuple(np.frombuffer(bytes(seq.token_bytes), TOKEN_DTYPE)[:num_tokens].tolist())


def admit(blocks: BlockManager, tokens: list[int], *, tenant: Tenant = DEFAULT_TENANT, number: int = 0) -> Sequence:
    """Give a sequence its blocks, and send all its tokens; `number` is its tenant's."""
    seq = make_sequence(1, tokens)
    seq.tenant, seq.tenant_number = tenant, number
    assert blocks.try_allocate(seq, blocks.find_prefix(seq))
    blocks.publish(seq, len(tokens))
    return seq


def save(blocks: BlockManager, seq: Sequence, num_tokens: int, *, is_finite: bool = True) -> int:
    """Save a state with a step that returns."""
    checkpoint = blocks.try_save_state(seq, num_tokens)
    assert checkpoint is not None
    blocks.end_step([(0, checkpoint)], (), FINITE if is_finite else np.array([0], np.int32))
    return checkpoint


def found(blocks: BlockManager, tokens: list[int]) -> tuple[int, int | None, bool, int]:
    prefix = blocks.find_prefix(make_sequence(9, tokens))
    return prefix.num_tokens, prefix.checkpoint, prefix.awaits_state, prefix.num_lost_tokens


def test_a_prefix_ends_at_the_deepest_state_that_a_returned_step_saved() -> None:
    blocks = make_blocks(2)
    seq = admit(blocks, PROMPT)
    # Nothing that is cached can be continued.
    assert found(blocks, [*PROMPT, 1]) == (0, None, False, 12)
    first = blocks.try_save_state(seq, 4)
    assert first is not None
    assert found(blocks, [*PROMPT, 1]) == (0, None, True, 12)
    blocks.end_step([(0, first)], (), FINITE)
    second = blocks.try_save_state(seq, 8)
    assert second is not None
    assert found(blocks, [*PROMPT, 1]) == (4, first, True, 8)
    # What it saves does not concern a prompt that ends before.
    assert found(blocks, PROMPT[:7]) == (4, first, False, 2)
    blocks.end_step([(0, second)], (), FINITE)
    assert found(blocks, [*PROMPT, 1]) == (8, second, False, 4)


def test_a_state_that_is_not_finite_is_never_found() -> None:
    blocks = make_blocks(1)
    seq = admit(blocks, PROMPT)
    save(blocks, seq, 4, is_finite=False)
    assert found(blocks, PROMPT) == (0, None, False, 10)
    assert blocks.checkpoint_counts == (1, 0)


def test_the_least_recently_used_state_is_evicted_but_none_that_a_step_in_flight_reads() -> None:
    blocks = make_blocks(2)
    seq = admit(blocks, PROMPT)
    first, second = save(blocks, seq, 2), save(blocks, seq, 4)
    blocks.restore_state(first)
    # The second one is older now; then all are in use.
    assert blocks.try_save_state(seq, 6) == second
    assert blocks.try_save_state(seq, 8) is None
    blocks.end_step([(0, second)], [(0, first)], FINITE)
    assert found(blocks, PROMPT)[:2] == (6, second)
    assert found(blocks, PROMPT[:5])[:2] == (2, first)


def test_states_that_were_restored_outlive_those_that_were_only_saved() -> None:
    blocks = make_blocks(4)
    seq = admit(blocks, PROMPT)
    shared = save(blocks, seq, 2)
    blocks.restore_state(shared)
    blocks.end_step((), [(0, shared)], FINITE)
    for num_tokens in (4, 6, 8, 10, 12):
        save(blocks, seq, num_tokens)
    assert found(blocks, PROMPT[:5])[:2] == (2, shared)
    assert found(blocks, PROMPT[:7])[:2] == (2, shared)
    assert found(blocks, PROMPT)[0] == 10


@pytest.mark.parametrize("weight", [0.5, 1.0, 2.0])
def test_a_tenant_that_saves_many_states_leaves_others_theirs_by_weight(weight: float) -> None:
    blocks = make_blocks(12, num_blocks=200)
    quiet = admit(blocks, PROMPT, tenant=Tenant("quiet", weight), number=1)
    share = round(12 * weight / (1 + weight))
    for num_tokens in range(2, 2 * share + 1, 2)[:5]:
        save(blocks, quiet, num_tokens)
    kept = min(share, 5)
    flood = admit(blocks, list(range(100, 300)), number=2)
    for num_tokens in range(2, 2 * (12 * MAX_TURNOVERS - 1), 2):
        save(blocks, flood, num_tokens)
        assert found(blocks, [*PROMPT, 0])[0] == 2 * kept, "another's state was evicted"
    assert blocks.checkpoint_counts.used == 12
    # One that leaves its states alone for long does not keep them for ever.
    other = admit(blocks, list(range(300, 320)), number=2)
    for num_tokens in range(2, 18, 2):
        save(blocks, other, num_tokens)
    assert found(blocks, [*PROMPT, 0])[0] < 2 * kept


@settings(max_examples=60)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=3, max_size=3),
    actions=st.lists(st.tuples(st.sampled_from(["save", "save", "use", "remove"]), st.integers(0, 2)), max_size=60),
    num_checkpoints=st.integers(1, 6),
)
def test_the_tenant_with_most_states_by_weight_loses_the_next_one(
    weights: list[float], actions: list[tuple[str, int]], num_checkpoints: int
) -> None:
    order, held = EvictionOrder([0] * num_checkpoints), [list[int]() for _ in weights]
    for name, tenant in actions:
        free = set(range(num_checkpoints)).difference(*held)
        if name == "save":
            if not free:
                evicted = order.find_next()
                assert evicted is not None
                [victim] = [each for each, own in enumerate(held) if evicted in own]
                fullness = [len(own) / weight for own, weight in zip(held, weights, strict=True)]
                assert fullness[victim] == max(fullness)
                order.remove(evicted)
                held[victim].remove(evicted)
                free = {evicted}
            checkpoint = free.pop()
            order.add(checkpoint, tenant, weights[tenant])
            order.show(checkpoint)
            held[tenant].append(checkpoint)
        elif held[tenant] and name == "use":
            order.use(held[tenant][0])
        elif held[tenant]:
            order.remove(held[tenant].pop())
        order.check_integrity()
        assert order.visible == set[int]().union(*held)


def test_a_newer_block_of_a_content_takes_its_state_over() -> None:
    blocks = make_blocks(2)
    older = admit(blocks, PROMPT)
    checkpoint = save(blocks, older, 4)
    newer = make_sequence(2, PROMPT)
    assert blocks.try_allocate(newer, blocks.no_prefix(newer))
    blocks.publish(newer, 12)
    blocks.free([older])
    assert found(blocks, PROMPT)[:2] == (4, checkpoint)
    blocks.check_integrity([newer])


def test_an_older_record_of_the_same_sequence_is_overwritten() -> None:
    blocks = make_blocks(2)
    seq = admit(blocks, PROMPT)
    first = save(blocks, seq, 2)
    assert blocks.try_save_state(seq, 4, renewed_at=2) == first
    # Not while a step in flight still writes it.
    assert blocks.try_save_state(seq, 6, renewed_at=4) not in (None, first)


def test_a_state_goes_with_its_block() -> None:
    blocks = make_blocks(2, num_blocks=6)
    seq = admit(blocks, PROMPT[:8])
    first, _ = save(blocks, seq, 4), save(blocks, seq, 8)
    blocks.free([seq])
    # Tails are evicted first.
    assert blocks.try_take(3) is not None
    assert found(blocks, [*PROMPT[:8], 0]) == (4, first, False, 2)
    assert blocks.checkpoint_counts.used == 1
    # A block that was never published keeps none.
    other = make_sequence(2, [1, 2])
    assert blocks.try_allocate(other, blocks.find_prefix(other))
    save(blocks, other, 2)
    blocks.free([other])
    assert blocks.checkpoint_counts.used == 1


def test_a_state_behind_an_evicted_block_goes_first() -> None:
    blocks = make_blocks(2, num_blocks=8)
    other = admit(blocks, [1, 2, 3, 4])
    save(blocks, other, 2)
    whole = admit(blocks, PROMPT[:8])
    save(blocks, whole, 8)
    # Another sequence computes the head too, so that its blocks hold it.
    head = make_sequence(3, PROMPT[:4])
    assert blocks.try_allocate(head, blocks.no_prefix(head))
    blocks.publish(head, 4)
    blocks.free([head])
    blocks.free([whole])
    assert blocks.try_take(3) is not None
    assert found(blocks, [*PROMPT[:8], 0])[0] == 0
    save(blocks, other, 4)
    # The state of `other` was the least recently used one, but can still be reached.
    assert found(blocks, [1, 2, 0])[0] == 2


@pytest.mark.parametrize("withdraw", ["hide", "flush"])
def test_what_was_derived_from_a_withdrawn_state_is_withdrawn(withdraw: str) -> None:
    blocks = make_blocks(4)
    bad = admit(blocks, PROMPT[:5])
    save(blocks, bad, 4)
    derived = admit(blocks, PROMPT)
    assert derived.block_table[:2] == bad.block_table[:2]
    save(blocks, derived, 10)
    coming = blocks.try_save_state(derived, 6)
    assert coming is not None
    if withdraw == "hide":
        blocks.hide(bad)
    else:
        blocks.flush()
    blocks.end_step([(0, coming)], (), FINITE)
    assert blocks.checkpoint_counts.used == 0
    # Once the head is computed again, what is behind it can be found again, but no state of it.
    admit(blocks, PROMPT[:5])
    assert found(blocks, PROMPT)[:3] == (0, None, False)


@dataclass(eq=False)
class Flight:
    """A step in flight: what it restores and saves, with the tokens of each state."""

    sequences: list[Sequence]
    restores: list[tuple[int, int]] = field(default_factory=list)
    restored: list[tuple[int, ...]] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)
    saved: list[tuple[int, ...] | None] = field(default_factory=list)
    """None for a reserved checkpoint that the step leaves as it is."""
    attached: list[tuple[Sequence, int, int, int]] = field(default_factory=list)
    """What `attach_state` is told of reserved ones that it saves."""


class Checkpoints(RuleBasedStateMachine):
    """A tree, its blocks and checkpoints, beside a worker that runs steps in order and keeps real contents.

    Prompts are the beginnings of three texts that share theirs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = make_blocks(3, num_blocks=9)
        self.running: list[Sequence] = []
        self.in_flight: deque[Flight] = deque()
        # What the worker's checkpoints hold, and those saved by steps that have returned finite.
        self.memory: dict[int, tuple[int, ...]] = {}
        self.returned: dict[int, tuple[int, ...]] = {}

    @rule(text=st.sampled_from(TEXTS), length=st.integers(2, 9), salt=st.sampled_from([b"", b"", b"", b"s"]))
    def admit(self, text: list[int], length: int, salt: bytes) -> None:
        """Admit a sequence, and send it whole; its first save is on demand, as a lookup would have hit further."""
        tokens = text[:length]
        seq = make_sequence(1, tokens)
        seq.cache_salt, seq.tenant_number = salt, len(salt)
        prefix = self.blocks.find_prefix(seq)
        if prefix.awaits_state or not self.blocks.try_allocate(seq, prefix):
            return
        self.running.append(seq)
        flight = Flight([seq])
        if prefix.checkpoint is None:
            assert not prefix.num_tokens, "a prefix without its state"
        else:
            state = tokens_of(seq, prefix.num_tokens)
            assert self.returned[prefix.checkpoint] == (*salt, *state), "not saved at this token by a returned step"
            self.blocks.restore_state(prefix.checkpoint)
            flight.restores.append((0, prefix.checkpoint))
            flight.restored.append((*salt, *state))
        self.blocks.publish(seq, len(tokens))
        if prefix.num_lost_tokens:
            self.save_at(seq, prefix.num_tokens + prefix.num_lost_tokens, flight)
        self.in_flight.append(flight)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), renews=st.booleans())
    def save(self, data: st.DataObject, *, renews: bool) -> None:
        """Save a running sequence's state somewhere, or renew its record there, as if it had decoded until then."""
        seq = data.draw(st.sampled_from(self.running))
        num_blocks = seq.num_stored_tokens // BLOCK_SIZE
        if num_blocks:
            at = BLOCK_SIZE * data.draw(st.integers(1, num_blocks))
            older = BLOCK_SIZE * data.draw(st.integers(1, num_blocks)) if renews else 0
            flight = Flight([seq])
            self.save_at(seq, at, flight, older)
            self.in_flight.append(flight)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), renews=st.booleans())
    def reserve(self, data: st.DataObject, *, renews: bool) -> None:
        """Reserve a checkpoint for a step with drafts, which passes the end of some block, or of none."""
        seq, checkpoint = data.draw(st.sampled_from(self.running)), self.blocks.try_reserve_state()
        if checkpoint is None:
            return
        num_blocks = seq.num_stored_tokens // BLOCK_SIZE
        at = BLOCK_SIZE * data.draw(st.integers(0, num_blocks))
        flight = Flight([seq])
        self.take(checkpoint, flight, (*seq.cache_salt, *tokens_of(seq, at)) if at else None)
        if at:
            older = BLOCK_SIZE * data.draw(st.integers(1, num_blocks)) if renews else 0
            flight.attached.append((seq, checkpoint, at, older))
        self.in_flight.append(flight)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def decode(self, data: st.DataObject, token: int) -> None:
        """Let a sequence grow by a block's tokens; its blocks stay unpublished until it ends."""
        seq = data.draw(st.sampled_from(self.running))
        taken = self.blocks.try_take(1)
        if taken is not None:
            seq.block_table.extend(taken)
            seq.token_bytes += np.array([token] * BLOCK_SIZE, TOKEN_DTYPE).tobytes()

    @precondition(lambda self: self.in_flight)
    @rule(is_finite=st.booleans())
    def step_returns(self, *, is_finite: bool) -> None:
        """Run and return the oldest step."""
        flight = self.in_flight.popleft()
        for (_, checkpoint), state in zip(flight.restores, flight.restored, strict=True):
            assert self.memory[checkpoint] == state, "overwritten before it was restored"
        for (_, checkpoint), saved in zip(flight.saves, flight.saved, strict=True):
            if saved is not None:
                self.memory[checkpoint] = saved
            if saved is not None and is_finite:
                self.returned[checkpoint] = saved
        for attached in flight.attached:
            self.blocks.attach_state(*attached)
        self.blocks.end_step(
            flight.saves, flight.restores, FINITE if is_finite else np.arange(len(flight.saves), dtype=np.int32)
        )

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), is_published=st.booleans())
    def end(self, data: st.DataObject, *, is_published: bool) -> None:
        """End a sequence that no step in flight names."""
        seq = data.draw(st.sampled_from(self.idle()))
        if is_published:
            self.blocks.publish(seq, seq.num_stored_tokens - 1)
        self.running.remove(seq)
        self.blocks.free([seq])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_flushed=st.booleans())
    def withdraw(self, data: st.DataObject, *, is_flushed: bool) -> None:
        """Withdraw everything, or what was derived from one sequence's blocks."""
        seq = data.draw(st.sampled_from(self.running))
        if is_flushed:
            self.blocks.flush()
            in_use = {checkpoint for flight in self.in_flight for _, checkpoint in [*flight.saves, *flight.restores]}
            assert self.blocks.checkpoint_counts.used == len(in_use), "more than steps in flight use"
            return
        self.blocks.hide(seq)
        again = make_sequence(1, list(tokens_of(seq)))
        again.cache_salt = seq.cache_salt
        # Those of others that computed the same may still be found.
        assert not set(seq.block_table).intersection(self.blocks.find_prefix(again).block_ids.tolist())

    @invariant()
    def all_agrees(self) -> None:
        """Pools, counts, tree and tables agree."""
        self.blocks.check_integrity(self.running)

    def idle(self) -> list[Sequence]:
        """Sequences that no step in flight names."""
        named = {seq for flight in self.in_flight for seq in flight.sequences}
        return [seq for seq in self.running if seq not in named]

    def save_at(self, seq: Sequence, num_tokens: int, flight: Flight, renewed_at: int = 0) -> None:
        """Add a save to a step."""
        checkpoint = self.blocks.try_save_state(seq, num_tokens, renewed_at)
        if checkpoint is not None:
            self.take(checkpoint, flight, (*seq.cache_salt, *tokens_of(seq, num_tokens)))

    def take(self, checkpoint: int, flight: Flight, saved: tuple[int, ...] | None) -> None:
        """Add a save of a checkpoint that was just taken to a step."""
        in_use = [each for other in (*self.in_flight, flight) for _, each in (*other.saves, *other.restores)]
        assert checkpoint not in in_use, "a step in flight saves or restores it"
        self.returned.pop(checkpoint, None)
        flight.saves.append((0, checkpoint))
        flight.saved.append(saved)


TestCheckpoints = Checkpoints.TestCase
TestCheckpoints.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
