"""Blocks under a state machine: whatever the order, counts, lists, index and tables agree, and hits are true."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from services.scheduler.block_manager import BlockManager
from services.scheduler.sequence import Sequence
from shared.limits import SamplingParams
from tests.support.engine_driver import token_bytes
from tests.unit.scheduler.test_prefix_cache import COLLIDING_A, COLLIDING_B


def make_seq(tokens: list[int]) -> Sequence:
    return Sequence("id", 1, 1, SamplingParams(max_tokens=1), bytearray(token_bytes(tokens)), len(tokens), 0.0)


def allocate(manager: BlockManager, seq: Sequence) -> bool:
    return manager.try_allocate(seq, manager.find_prefix(seq))


def tokens_of(*blocks: int, block_size: int = 16, tail: int = 1) -> list[int]:
    """Full blocks, each of one repeated token, and a tail."""
    return [token for token in blocks for _ in range(block_size)] + [999] * tail


def test_failed_allocate_changes_nothing() -> None:
    manager = BlockManager(num_blocks=1, block_size=4)
    seq = make_seq(list(range(9)))
    assert not allocate(manager, seq)
    assert (seq.block_table, manager.num_free_blocks) == ([], 1)


def test_failed_append_changes_nothing() -> None:
    manager = BlockManager(num_blocks=1, block_size=4)
    seq = make_seq([1, 2, 3, 4])
    assert allocate(manager, seq)
    assert manager.try_append(seq) is None
    assert len(seq.block_table) == 1


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
    manager.free(first)
    # Three blocks are free, but two of them are the cached prefix and two more are needed.
    assert not allocate(manager, make_seq(tokens_of(1, 2, 3)))
    manager.check_integrity([])


def test_blank_blocks_are_reused_before_cached_ones_and_a_tail_before_its_head() -> None:
    manager = BlockManager(num_blocks=4, block_size=16)
    first = make_seq(tokens_of(1, 2, 3))
    assert allocate(manager, first)
    manager.publish(first, 49)
    manager.free(first)
    assert (manager.num_free_blocks, manager.num_cached_blocks) == (4, 3)
    other = make_seq(tokens_of(7, tail=1))
    assert allocate(manager, other)
    # The blank block went first, then the tail of the prefix.
    again = make_seq(tokens_of(1, 2, 3))
    manager.free(other)
    assert allocate(manager, again)
    assert again.num_cached_blocks == 2


def test_one_token_of_a_fully_cached_prompt_is_computed() -> None:
    manager = BlockManager(num_blocks=4, block_size=16)
    first = make_seq(tokens_of(1, 2, tail=0))
    assert allocate(manager, first)
    manager.publish(first, 32)
    second = make_seq(tokens_of(1, 2, tail=0))
    assert allocate(manager, second)
    assert second.num_cached_blocks == 1


def test_without_prefix_caching_nothing_is_shared() -> None:
    manager = BlockManager(num_blocks=8, block_size=16, enable_prefix_caching=False)
    first, second = make_seq(tokens_of(1)), make_seq(tokens_of(1))
    assert allocate(manager, first)
    manager.publish(first, 17)
    assert allocate(manager, second)
    assert not set(first.block_table) & set(second.block_table)
    assert manager.num_cached_blocks == 0


# The colliding pair beside ordinary blocks, so that the machine mixes prefixes whose hashes are equal.
BLOCKS = [COLLIDING_A, COLLIDING_B, *([token] * 16 for token in (1, 2, 3))]


class BlockManagerMachine(RuleBasedStateMachine):
    """Random lives of sequences on a small pool, against a record of what each block was filled with."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(num_blocks=6, block_size=16)
        self.sequences: list[Sequence] = []
        # The whole prefix that each block's KV was computed under.
        self.written: dict[int, bytes] = {}

    @rule(
        target=live,
        blocks=st.lists(st.sampled_from(BLOCKS), max_size=4),
        tail=st.integers(1, 16),
    )
    def allocate(self, blocks: list[list[int]], tail: int) -> Sequence:
        seq = make_seq([token for block in blocks for token in block] + [5] * tail)
        before = (self.manager.num_free_blocks, self.manager.num_cached_blocks)
        if not allocate(self.manager, seq):
            assert (seq.block_table, (self.manager.num_free_blocks, self.manager.num_cached_blocks)) == ([], before)
            return seq
        num_cached = seq.num_cached_blocks
        for number, block in enumerate(seq.block_table):
            prefix = bytes(seq.token_bytes[: (number + 1) * 64])
            if number < num_cached:
                assert self.written[block] == prefix, "a hit that was computed under another prefix"
            else:
                self.written[block] = prefix
        self.sequences.append(seq)
        return seq

    @rule(seq=live)
    def publish(self, seq: Sequence) -> None:
        if seq.block_table:
            self.manager.publish(seq, seq.num_stored_tokens)

    @rule(seq=live, token=st.integers(1, 3))
    def append_a_block(self, seq: Sequence, token: int) -> None:
        if not seq.block_table:
            return
        missing = -seq.num_stored_tokens % 16
        seq.token_bytes += token_bytes([token] * missing)
        self.written[seq.block_table[-1]] = bytes(seq.token_bytes)
        block = self.manager.try_append(seq)
        if block is not None:
            seq.token_bytes += token_bytes([token])
            self.written[block] = bytes(seq.token_bytes)

    @rule(seq=consumes(live))
    def free(self, seq: Sequence) -> None:
        if seq.block_table:
            self.manager.free(seq)
            self.sequences.remove(seq)

    @rule(seq=live)
    def preempt_and_revive(self, seq: Sequence) -> None:
        if not seq.block_table:
            return
        self.manager.publish(seq, seq.num_stored_tokens - 1)
        self.manager.free(seq)
        assert allocate(self.manager, seq), "its own blocks were just freed"
        for number in range(seq.num_cached_blocks):
            assert self.written[seq.block_table[number]] == bytes(seq.token_bytes[: (number + 1) * 64])
        for number in range(seq.num_cached_blocks, len(seq.block_table)):
            self.written[seq.block_table[number]] = bytes(seq.token_bytes[: (number + 1) * 64])

    @precondition(lambda self: not self.sequences)
    @rule(parent=st.sampled_from(BLOCKS), child=st.sampled_from(BLOCKS))
    def evict_a_parent_and_compute_it_again(self, parent: list[int], child: list[int]) -> None:
        self._evict_everything()
        family, twin = make_seq([*parent, *child, 5]), make_seq([*parent, 5])
        assert allocate(self.manager, family)
        assert allocate(self.manager, twin)
        # Neither found the other's parent block; the twin's is the newer one and goes away.
        self.manager.publish(family, 33)
        self.manager.publish(twin, 17)
        self.manager.free(twin)
        self._evict_everything()
        again = make_seq([*parent, 5])
        assert allocate(self.manager, again)
        assert again.num_cached_blocks == 0
        self.manager.publish(again, 17)
        heir = make_seq([*parent, *child, 6])
        assert allocate(self.manager, heir)
        assert heir.block_table[:2] == [again.block_table[0], family.block_table[1]]
        self.manager.check_integrity([family, again, heir])
        for seq in (family, again, heir):
            self.manager.free(seq)
        self._evict_everything()

    def _evict_everything(self) -> None:
        """Use every free block once for something that nobody asks for again."""
        filler = make_seq([7] * (16 * self.manager.num_free_blocks))
        assert allocate(self.manager, filler)
        self.manager.free(filler)

    @invariant()
    def everything_agrees(self) -> None:
        self.manager.check_integrity(self.sequences)


BlockManagerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestBlockManager = BlockManagerMachine.TestCase
