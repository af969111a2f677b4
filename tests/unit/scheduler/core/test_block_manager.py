"""Blocks under a state machine: in any order, the manager agrees with a model that keeps whole prefixes."""

from __future__ import annotations

from array import array
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from services.scheduler.core.batch.sequence import Sequence
from services.scheduler.core.block_manager import BlockManager
from shared.ids import RequestHandle
from shared.request.sampling_params import SamplingParams
from tests.support.scheduler.engine_driver import token_bytes


def make_seq(tokens: list[int], salt: bytes = b"") -> Sequence:
    params = SamplingParams(max_tokens=1)
    return Sequence(
        "id", 1, RequestHandle(1), params, bytearray(token_bytes(tokens)), len(tokens), 0.0, cache_salt=salt
    )


def allocate(manager: BlockManager, seq: Sequence) -> bool:
    return manager.try_allocate(seq, manager.find_prefix(seq))


def tokens_of(*blocks: int, block_size: int = 16, tail: int = 1) -> list[int]:
    """Full blocks, each of one repeated token, and a tail."""
    return [token for token in blocks for _ in range(block_size)] + [999] * tail


def test_failed_allocate_changes_nothing() -> None:
    manager = BlockManager(num_blocks=1, block_size=4)
    seq = make_seq(list(range(9)))
    assert not allocate(manager, seq)
    assert (len(seq.block_table), manager.num_free_blocks) == (0, 1)


def test_blocks_are_taken_all_or_none() -> None:
    manager = BlockManager(num_blocks=4, block_size=4)
    seq = make_seq([1, 2, 3, 4])
    assert allocate(manager, seq)
    assert manager.try_take(4) is None
    assert manager.num_free_blocks == 3
    blocks = manager.try_take(3)
    assert blocks == [1, 2, 3]
    seq.block_table.extend(blocks)
    manager.check_integrity([seq])
    assert manager.num_exclusive_blocks(seq) == 4


def test_a_cached_prefix_is_shared() -> None:
    manager = BlockManager(num_blocks=8, block_size=16)
    first = make_seq(tokens_of(1, 2))
    assert allocate(manager, first)
    manager.publish(first, 33)
    second = make_seq(tokens_of(1, 2, tail=3))
    assert manager.find_prefix(second).num_tokens == 32
    assert allocate(manager, second)
    assert second.block_table[:2] == first.block_table[:2]
    assert [manager.num_exclusive_blocks(seq) for seq in (first, second)] == [1, 1]


def test_revived_blocks_count_as_taken() -> None:
    manager = BlockManager(num_blocks=3, block_size=16)
    first = make_seq(tokens_of(1, 2))
    assert allocate(manager, first)
    manager.publish(first, 33)
    manager.free([first])
    # Three blocks are free, but two of them are the cached prefix, and two more are needed.
    assert not allocate(manager, make_seq(tokens_of(1, 2, 3)))
    manager.check_integrity([])


def test_blank_blocks_are_reused_before_cached_ones_and_a_tail_before_its_head() -> None:
    manager = BlockManager(num_blocks=4, block_size=16)
    first = make_seq(tokens_of(1, 2, 3))
    assert allocate(manager, first)
    manager.publish(first, 49)
    manager.free([first])
    assert (manager.num_free_blocks, manager.num_cached_blocks) == (4, 3)
    other = make_seq(tokens_of(7, tail=1))
    assert allocate(manager, other)
    # The blank block was taken first, then the tail of the prefix.
    again = make_seq(tokens_of(1, 2, 3))
    manager.free([other])
    prefix = manager.find_prefix(again)
    assert len(prefix.block_ids) == 2
    assert manager.try_allocate(again, prefix)
    assert again.block_table[:2].tolist() == prefix.block_ids.tolist()


def test_the_last_token_of_a_fully_cached_prompt_is_computed() -> None:
    manager = BlockManager(num_blocks=4, block_size=16)
    first = make_seq(tokens_of(1, 2, tail=0))
    assert allocate(manager, first)
    manager.publish(first, 32)
    second = make_seq(tokens_of(1, 2, tail=0))
    prefix = manager.find_prefix(second)
    assert prefix.block_ids.tolist() == first.block_table[:1].tolist()
    assert manager.try_allocate(second, prefix)
    assert second.block_table[:1] == first.block_table[:1] != second.block_table[1:]


def test_a_freed_block_with_a_newer_copy_is_blank() -> None:
    manager = BlockManager(num_blocks=8, block_size=16)
    first, twin = make_seq(tokens_of(1, 2)), make_seq(tokens_of(1, 2))
    for seq in (first, twin):
        assert allocate(manager, seq)
    manager.publish(first, 33)
    manager.free([first])
    assert manager.num_cached_blocks == 2
    manager.publish(twin, 33)
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (0, 5)
    manager.check_integrity([twin])
    manager.free([twin])
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (2, 8)
    manager.check_integrity([])


def test_without_prefix_caching_nothing_is_shared() -> None:
    manager = BlockManager(num_blocks=8, block_size=16, enable_prefix_caching=False)
    first, second = make_seq(tokens_of(1)), make_seq(tokens_of(1))
    assert allocate(manager, first)
    manager.publish(first, 17)
    assert allocate(manager, second)
    assert not set(first.block_table) & set(second.block_table)
    assert manager.num_cached_blocks == 0


def test_a_second_lookup_finds_newly_published_blocks_and_no_evicted_ones() -> None:
    manager = BlockManager(num_blocks=5, block_size=16)
    first, waiting = make_seq(tokens_of(1, 2)), make_seq(tokens_of(1, 2, 3))
    assert allocate(manager, first)
    assert manager.num_cached_tokens(waiting) == 0
    manager.publish(first, 16)
    assert manager.num_cached_tokens(waiting) == 16
    manager.publish(first, 33)
    assert manager.num_cached_tokens(waiting) == 32
    manager.free([first])
    # Three blank blocks and the tail of the prefix.
    assert manager.try_take(4) is not None
    assert manager.find_prefix(waiting).block_ids.tolist() == [0]
    assert manager.find_prefix(make_seq(tokens_of(1))).block_ids.tolist() == [0]


def test_a_lookup_cached_from_an_earlier_epochs_pool_is_discarded() -> None:
    seq = make_seq(tokens_of(1, 2))
    for published in (tokens_of(1, 2), tokens_of(5)):
        manager = BlockManager(num_blocks=8, block_size=16)
        other = make_seq(published)
        assert allocate(manager, other)
        manager.publish(other, len(published))
        found = manager.num_cached_tokens(seq)
        assert found == manager.find_prefix(make_seq(tokens_of(1, 2))).num_tokens


def test_after_a_flush_nothing_is_found_and_running_sequences_publish_nothing() -> None:
    manager = BlockManager(num_blocks=8, block_size=16)
    running, ended = make_seq(tokens_of(1, 2, 3)), make_seq(tokens_of(5, 6))
    for seq in (running, ended):
        assert allocate(manager, seq)
        manager.publish(seq, 32)
    manager.free([ended])
    # Two free cached blocks, and two in use that a lookup could find.
    assert manager.flush() == 4
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (0, 4)
    manager.publish(running, 48)
    assert manager.num_cached_tokens(make_seq(tokens_of(1, 2, 3))) == 0
    manager.check_integrity([running])
    manager.hide(running)
    manager.free([running])
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (0, 8)
    # After another admission, it publishes again.
    assert allocate(manager, running)
    manager.publish(running, 49)
    assert manager.num_cached_tokens(make_seq(tokens_of(1, 2, 3))) == 48
    manager.check_integrity([running])
    assert manager.flush() == 3


def test_with_block_size_one_tokens_are_cached_one_by_one() -> None:
    manager = BlockManager(num_blocks=16, block_size=1)
    first = make_seq([1, 2, 3, 4])
    assert allocate(manager, first)
    manager.publish(first, 4)
    assert manager.num_cached_tokens(make_seq([1, 2, 3, 9, 4])) == 3
    assert manager.num_cached_tokens(make_seq([1, 2, 3, 4])) == 3


# Few enough that prompts often share prefixes.
FIRST_BLOCKS = [[1] * 16] * 3 + [[1] * 15 + [2]]
LATER_BLOCKS = [[1] * 16] * 2 + [[2] * 16]
SALTS = [b""] * 6 + [b"tenant"]

Key = tuple[bytes, bytes]
"""A salt, and the tokens of a block with all tokens before it."""


def key_of(seq: Sequence, number: int) -> Key:
    return seq.cache_salt, bytes(seq.token_bytes[: (number + 1) * 64])


class Model:
    """The expected cache contents, as whole prefixes instead of paths."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blank = num_blocks
        # Free blocks with contents, in the order in which they are taken.
        self.cached: list[int] = []
        # The key under which each block with contents was computed, and the newest block for each key.
        self.written: dict[int, Key] = {}
        self.holders: dict[Key, int] = {}

    def find(self, seq: Sequence) -> list[int]:
        blocks: list[int] = []
        for number in range((seq.num_stored_tokens - 1) // 16):
            block = self.holders.get(key_of(seq, number))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def share(self, blocks: list[int]) -> None:
        self.cached = [block for block in self.cached if block not in blocks]

    def take(self, blocks: list[int]) -> None:
        num_evicted = max(0, len(blocks) - self.num_blank)
        self.num_blank -= len(blocks) - num_evicted
        evicted, self.cached = self.cached[:num_evicted], self.cached[num_evicted:]
        assert blocks[len(blocks) - num_evicted :] == evicted, "blocks other than the least recently freed"
        for block in evicted:
            self.hide(block)
        assert not any(block in self.written for block in blocks), "a block that is in use"

    def publish(self, key: Key, block: int) -> None:
        older = self.holders.get(key)
        if older is not None:
            self.hide(older)
            if older in self.cached:
                self.cached.remove(older)
                self.num_blank += 1
        self.holders[key] = block
        self.written[block] = key

    def hide(self, block: int) -> None:
        key = self.written.pop(block, None)
        if key is not None:
            del self.holders[key]

    def free(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            if block in self.written:
                self.cached.append(block)
            else:
                self.num_blank += 1

    def flush(self) -> int:
        num_flushed = len(self.written)
        self.num_blank += len(self.cached)
        self.cached, self.written, self.holders = [], {}, {}
        return num_flushed


NUM_BLOCKS = 8


class BlockManagerMachine(RuleBasedStateMachine):
    """Random sequences that enter, grow and leave a small pool."""

    waiting = Bundle("waiting")
    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, block_size=16)
        self.model = Model(NUM_BLOCKS)
        self.waiting_sequences: list[Sequence] = []
        self.sequences: list[Sequence] = []
        # Sequences that were running at the last flush: they publish nothing.
        self.before_flush: list[Sequence] = []

    @rule(
        target=waiting,
        first=st.sampled_from(FIRST_BLOCKS),
        later=st.lists(st.sampled_from(LATER_BLOCKS), max_size=2),
        tail=st.sampled_from([[], [5]]),
        salt=st.sampled_from(SALTS),
    )
    def arrive(self, first: list[int], later: list[list[int]], tail: list[int], salt: bytes) -> Sequence:
        seq = make_seq([*first, *(token for block in later for token in block), *tail], salt)
        self.waiting_sequences.append(seq)
        self.look(seq)
        return seq

    @rule()
    def look_at_all(self) -> None:
        for seq in self.waiting_sequences:
            self.look(seq)

    def look(self, seq: Sequence) -> None:
        found = self.manager.find_prefix(seq)
        fresh = self.manager.find_prefix(replace(seq, cached_prefix=None))
        assert found.block_ids.tolist() == fresh.block_ids.tolist(), "a prefix that is not up to date"
        assert found.num_tokens == self.manager.num_cached_tokens(seq) == 16 * len(found.block_ids)
        assert found.block_ids.tolist() == self.model.find(seq)

    @rule(target=live, seq=consumes(waiting), num_computed_blocks=st.sampled_from([3, 1, 0, 0]))
    def admit(self, seq: Sequence, num_computed_blocks: int) -> Sequence:
        if seq in self.waiting_sequences:
            self.waiting_sequences.remove(seq)
        self.look(seq)
        prefix = self.manager.find_prefix(seq)
        before = (self.manager.num_free_blocks, self.manager.num_cached_blocks)
        num_to_take = self.manager.num_blocks_to_take(seq, prefix)
        if self.manager.try_allocate(seq, prefix):
            assert self.manager.num_free_blocks == before[0] - num_to_take
            num_shared = len(prefix.block_ids)
            table = seq.block_table.tolist()
            assert table[:num_shared] == prefix.block_ids.tolist()
            self.model.share(table[:num_shared])
            self.model.take(table[num_shared:])
            self.sequences.append(seq)
            self.publish(seq, num_computed_blocks)
        else:
            assert num_to_take > before[0]
            assert not seq.block_table
            assert (self.manager.num_free_blocks, self.manager.num_cached_blocks) == before
        return seq

    @rule(seq=waiting)
    def serve_a_twin(self, seq: Sequence) -> None:
        twin = replace(seq, cached_prefix=None, token_bytes=bytearray(seq.token_bytes))
        self.admit(twin, 3)
        self.free(twin)
        self.look_at_all()

    @rule(seq=live, num_blocks=st.integers(1, 4))
    def publish(self, seq: Sequence, num_blocks: int) -> None:
        num_tokens = min(16 * num_blocks + 5, seq.num_stored_tokens)
        if not seq.block_table:
            return
        num_published = seq.prefix_cursor.num_blocks
        self.manager.publish(seq, num_tokens)
        if seq not in self.before_flush:
            for number in range(num_published, num_tokens // 16):
                self.model.publish(key_of(seq, number), seq.block_table[number])

    @rule(seq=live, token=st.integers(1, 3))
    def decode_into_a_new_block(self, seq: Sequence, token: int) -> None:
        if not seq.block_table:
            return
        seq.token_bytes += token_bytes([token] * (-seq.num_stored_tokens % 16))
        blocks = self.manager.try_take(1)
        assert (blocks is None) == (not self.model.num_blank and not self.model.cached)
        if blocks is not None:
            self.model.take(blocks)
            seq.block_table.extend(blocks)
            seq.token_bytes += token_bytes([token])

    @rule(target=waiting, seq=consumes(live))
    def preempt(self, seq: Sequence) -> Sequence:
        self.free(seq)
        self.waiting_sequences.append(seq)
        return seq

    @rule(seq=live)
    def hide(self, seq: Sequence) -> None:
        self.manager.hide(seq)
        for block in seq.block_table:
            self.model.hide(block)

    @rule(num_blocks=st.integers(1, NUM_BLOCKS))
    def reuse_blocks(self, num_blocks: int) -> None:
        blocks = self.manager.try_take(min(num_blocks, self.manager.num_free_blocks))
        assert blocks is not None
        self.model.take(blocks)
        passing = make_seq([])
        passing.block_table = array("i", blocks)
        self.model.free(blocks)
        self.manager.free([passing])

    @rule()
    def flush(self) -> None:
        assert self.manager.flush() == self.model.flush()
        self.before_flush = list(self.sequences)

    @precondition(lambda self: not self.sequences)
    @rule(parent=st.sampled_from(FIRST_BLOCKS), child=st.sampled_from(LATER_BLOCKS), salt=st.sampled_from(SALTS))
    def evict_a_parent_and_compute_it_again(self, parent: list[int], child: list[int], salt: bytes) -> None:
        self.reuse_blocks(NUM_BLOCKS)
        family, twin = make_seq([*parent, *child, 5], salt), make_seq([*parent, 5], salt)
        # Neither finds the other's parent block; the twin's is the newer one and is evicted.
        self.admit(family, 0)
        self.admit(twin, 0)
        self.publish(family, 2)
        self.publish(twin, 1)
        self.free(twin)
        self.reuse_blocks(NUM_BLOCKS)
        again = make_seq([*parent, 5], salt)
        assert not self.manager.find_prefix(again).block_ids.size
        self.admit(again, 1)
        heir = make_seq([*parent, *child, 6], salt)
        self.admit(heir, 0)
        assert heir.block_table[:2].tolist() == [again.block_table[0], family.block_table[1]]
        for seq in (family, again, heir):
            self.free(seq)

    @invariant()
    def everything_agrees(self) -> None:
        self.manager.check_integrity(self.sequences)
        assert self.manager.num_cached_blocks == len(self.model.cached)
        assert self.manager.num_free_blocks == len(self.model.cached) + self.model.num_blank

    @rule(seq=consumes(live))
    def free(self, seq: Sequence) -> None:
        if not seq.block_table:
            return
        self.sequences.remove(seq)
        if seq in self.before_flush:
            self.before_flush.remove(seq)
        held = {block for other in self.sequences for block in other.block_table}
        assert self.manager.num_exclusive_blocks(seq) == len(set(seq.block_table) - held)
        self.model.free([block for block in seq.block_table if block not in held])
        self.manager.free([seq])


BlockManagerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestBlockManager = BlockManagerMachine.TestCase
