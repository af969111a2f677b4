"""nano-vLLM's scheduler as a contestant, reproduced from its published algorithm.

Rewritten after GeeeekExplorer/nano-vllm, commit bb823b3e06983d71485a8e1f23715ebd87d98ef8, files
`nanovllm/engine/{scheduler,block_manager,sequence}.py`: prefill first, else one token for every running sequence;
tokens in Python lists; one hash per full block, computed when the step that filled it has returned; a deque of free
blocks, from whose middle a cached block is removed in O(pool). The cost is meant to match theirs, so each of their
loops, list copies, property look-ups and hashes is here. No messages are included.
"""

from __future__ import annotations

import enum
import gc
from collections import deque
from collections.abc import Iterable
from functools import partial

import numpy as np
import xxhash

from tests.bench.parts.tokens import expected_tokens
from tests.bench.peers.contestant import MAX_NUM_BATCHED_TOKENS, Request, Sizes, StepTokens, Stopwatch
from tests.bench.peers.protocol import serve
from tests.bench.peers.scenarios import Admission, Churn, Decode

EOS = 2
_NO_HASH = -1


class Status(enum.Enum):
    """The state of a sequence."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """A prompt with its completion, in one list."""

    def __init__(self, key: int, prompt: list[int], max_tokens: int, block_size: int) -> None:
        self.key = key
        self.block_size = block_size
        self.status = Status.WAITING
        self.token_ids = list(prompt)
        self.last_token = prompt[-1]
        self.num_tokens = len(prompt)
        self.num_prompt_tokens = len(prompt)
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0
        self.is_prefill = True
        self.block_table: list[int] = []
        self.max_tokens = max_tokens
        self.ignore_eos = True

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks that hold its tokens."""
        return -(-self.num_tokens // self.block_size)

    def block(self, index: int) -> list[int]:
        """The tokens of a block."""
        assert 0 <= index < self.num_blocks
        return self.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def append_token(self, token_id: int) -> None:
        """Append the next token."""
        self.token_ids.append(token_id)
        self.last_token = token_id
        self.num_tokens += 1


class Block:
    """One KV block: its reference count, and its content for prefix lookup."""

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.hash = _NO_HASH
        self.token_ids: list[int] = []

    def fill(self, block_hash: int, token_ids: list[int]) -> None:
        """Set its content."""
        self.hash = block_hash
        self.token_ids = token_ids

    def take_blank(self) -> None:
        """Allocate it with one reference and no content."""
        self.ref_count = 1
        self.hash = _NO_HASH
        self.token_ids = []


class BlockManager:
    """Allocates blocks, and finds cached blocks of equal prefixes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.hash_to_block_id: dict[int, int] = {}
        self.free_block_ids = deque(range(num_blocks))
        self.used_block_ids: set[int] = set()

    def count_cached_blocks(self, seq: Sequence) -> int | None:
        """The number of leading cached blocks; None if the rest does not fit."""
        block_hash, num_cached, num_new = _NO_HASH, 0, seq.num_blocks
        for index in range(seq.num_blocks - 1):
            token_ids = seq.block(index)
            block_hash = _hash(token_ids, block_hash)
            block_id = self.hash_to_block_id.get(block_hash, -1)
            if block_id == -1 or self.blocks[block_id].token_ids != token_ids:
                break
            num_cached += 1
            num_new -= block_id in self.used_block_ids
        return num_cached if len(self.free_block_ids) >= num_new else None

    def allocate(self, seq: Sequence, num_cached: int) -> None:
        """Allocate a sequence's blocks; the cached ones are hashed again."""
        block_hash = _NO_HASH
        for index in range(num_cached):
            block_hash = _hash(seq.block(index), block_hash)
            block_id = self.hash_to_block_id[block_hash]
            block = self.blocks[block_id]
            if block_id in self.used_block_ids:
                block.ref_count += 1
            else:
                block.ref_count = 1
                self.free_block_ids.remove(block_id)
                self.used_block_ids.add(block_id)
            seq.block_table.append(block_id)
        for _ in range(num_cached, seq.num_blocks):
            seq.block_table.append(self._take())
        seq.num_cached_tokens = num_cached * self.block_size

    def free(self, seq: Sequence) -> None:
        """Free a sequence's blocks."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.used_block_ids.remove(block_id)
                self.free_block_ids.append(block_id)
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    def can_append(self, seq: Sequence) -> bool:
        """Whether a block is available for its newest token."""
        return len(self.free_block_ids) >= (len(seq) % self.block_size == 1)

    def append(self, seq: Sequence) -> None:
        """Allocate a block if its newest token is the first of one."""
        if len(seq) % self.block_size == 1:
            seq.block_table.append(self._take())

    def hash_blocks(self, seq: Sequence) -> None:
        """Register the blocks that the last step filled for prefix lookup."""
        start = seq.num_cached_tokens // self.block_size
        end = (seq.num_cached_tokens + seq.num_scheduled_tokens) // self.block_size
        if start == end:
            return
        block_hash = self.blocks[seq.block_table[start - 1]].hash if start > 0 else _NO_HASH
        for index in range(start, end):
            block = self.blocks[seq.block_table[index]]
            token_ids = seq.block(index)
            block_hash = _hash(token_ids, block_hash)
            block.fill(block_hash, token_ids)
            self.hash_to_block_id[block_hash] = block.block_id

    def _take(self) -> int:
        block_id = self.free_block_ids.popleft()
        block = self.blocks[block_id]
        assert block.ref_count == 0
        if block.hash != _NO_HASH and self.hash_to_block_id.get(block.hash) == block_id:
            del self.hash_to_block_id[block.hash]
        block.take_blank()
        self.used_block_ids.add(block_id)
        return block_id


class Scheduler:
    """Prefill first, then decode; the last running sequence is preempted when no block is free."""

    def __init__(self, sizes: Sizes) -> None:
        self.max_num_seqs = sizes.max_num_seqs
        self.blocks = BlockManager(sizes.num_blocks, sizes.block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(seq)

    def schedule(self) -> tuple[list[Sequence], bool]:
        """The sequences of the next step, and whether it is a prefill."""
        scheduled = self._schedule_prefill()
        if scheduled:
            return scheduled, True
        while self.running and len(scheduled) < self.max_num_seqs:
            seq = self.running.popleft()
            while not self.blocks.can_append(seq):
                if self.running:
                    self._preempt(self.running.pop())
                else:
                    self._preempt(seq)
                    break
            else:
                seq.num_scheduled_tokens = 1
                seq.is_prefill = False
                self.blocks.append(seq)
                scheduled.append(seq)
        assert scheduled
        self.running.extendleft(reversed(scheduled))
        return scheduled, False

    def postprocess(self, seqs: list[Sequence], token_ids: list[int], *, is_prefill: bool) -> None:
        """Process a step's tokens."""
        for seq, token_id in zip(seqs, token_ids, strict=True):
            self.blocks.hash_blocks(seq)
            seq.num_cached_tokens += seq.num_scheduled_tokens
            seq.num_scheduled_tokens = 0
            if is_prefill and seq.num_cached_tokens < seq.num_tokens:
                continue
            seq.append_token(token_id)
            if (not seq.ignore_eos and token_id == EOS) or seq.num_completion_tokens == seq.max_tokens:
                seq.status = Status.FINISHED
                self.blocks.free(seq)
                self.running.remove(seq)

    def _schedule_prefill(self) -> list[Sequence]:
        scheduled: list[Sequence] = []
        num_batched_tokens = 0
        while self.waiting and len(scheduled) < self.max_num_seqs:
            seq = self.waiting[0]
            remaining = MAX_NUM_BATCHED_TOKENS - num_batched_tokens
            num_cached = self.blocks.count_cached_blocks(seq)
            if remaining == 0 or num_cached is None:
                break
            num_tokens = seq.num_tokens - num_cached * self.blocks.block_size
            if remaining < num_tokens:
                break
            self.blocks.allocate(seq, num_cached)
            seq.num_scheduled_tokens = num_tokens
            num_batched_tokens += seq.num_scheduled_tokens
            seq.status = Status.RUNNING
            self.waiting.popleft()
            self.running.append(seq)
            scheduled.append(seq)
        return scheduled

    def _preempt(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        seq.is_prefill = True
        self.blocks.free(seq)
        self.waiting.appendleft(seq)


class NanoVllm:
    """The scheduler with a device that computes nothing."""

    def __init__(self, sizes: Sizes) -> None:
        self.stopwatch = Stopwatch()
        self._block_size = sizes.block_size
        self._scheduler = Scheduler(sizes)

    def settle(self) -> None:
        """See `Contestant`. The original does not tune the collector, which would cost it more."""
        gc.collect()
        gc.freeze()

    def submit(self, requests: Iterable[Request]) -> None:
        """See `Contestant`."""
        for request in requests:
            prompt = request.prompt.tolist()
            with self.stopwatch.running():
                self._scheduler.add(Sequence(request.key, prompt, request.max_tokens, self._block_size))

    def step(self) -> StepTokens:
        """See `Contestant`."""
        with self.stopwatch.running():
            seqs, is_prefill = self._scheduler.schedule()
        keys = np.array([seq.key for seq in seqs], np.int64)
        positions = np.array([seq.num_completion_tokens for seq in seqs], np.int64)
        token_ids = expected_tokens(keys, positions).tolist()
        with self.stopwatch.running():
            self._scheduler.postprocess(seqs, token_ids, is_prefill=is_prefill)
        told = np.array([seq.last_token for seq in seqs], np.int64)
        return StepTokens(keys, told, [seq.key for seq in seqs if seq.status is Status.FINISHED])


def _hash(token_ids: list[int], parent: int) -> int:
    hasher = xxhash.xxh64()
    if parent != _NO_HASH:
        hasher.update(parent.to_bytes(8, "little"))
    hasher.update(np.array(token_ids).tobytes())
    return hasher.intdigest()


if __name__ == "__main__":
    serve({
        "decode": partial(Decode, NanoVllm),
        "churn": partial(Churn, NanoVllm),
        "admission": partial(Admission, NanoVllm),
    })  # fmt: skip
