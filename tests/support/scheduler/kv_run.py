"""A long random run of an engine, with outsiders that follow its KV events from the events alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np

from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.cache.block_hashes import hash_blocks, hash_salt
from services.scheduler.core.cache.kv_feed import KvFeed
from services.scheduler.core.cache.prefix_cache import PrefixCache
from services.scheduler.core.policy import CellTopology, SchedulerPolicy
from shared.request.sampling_params import SamplingOptions
from shared.tenants.tenant import DEFAULT_TENANT, salt_of
from tests.support.clients.kv_index import Listener, held_blocks, held_states
from tests.support.scheduler.core import make_sequence
from tests.support.scheduler.engine_driver import EngineDriver, token_bytes

BLOCK_SIZE = 4
_NUM_BLOCKS = 48
_CONTEXT = 96
_SALTS = (b"", b"", b"a", b"b")


@dataclass
class Seen:
    """What happened in a run, so that a test can tell that it met what it is about."""

    num_preemptions: int = 0
    num_flushes: int = 0
    num_losses: int = 0
    num_not_finite: int = 0
    num_late_checks: int = 0
    """Comparisons of a late listener's whole index while the cache held blocks."""
    max_blocks: int = 0
    num_states: int = 0
    """Saved states that listeners knew, at each comparison."""
    num_usable: int = 0
    """Blocks of prompts that listeners knew to be usable, at each comparison."""


class KvRun:
    """Submits, aborts, flushes, loses and attaches at random; after each action the listeners are compared.

    Prompts continue earlier ones, or fork from them, under a few salts, in a pool that is too small for them.
    """

    def __init__(
        self, seed: int, *, num_ranks: int = 2, slices: bool = True, num_checkpoint_slots: int | None = None
    ) -> None:
        """With `slices`, only a few blocks are hashed or scanned after each action, instead of all.

        With `num_checkpoint_slots`, the model has recurrent states.
        """
        self._random = random.Random(seed)
        self._slices = slices
        self._driver = EngineDriver(
            num_blocks=_NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            context_length=_CONTEXT,
            depth=2,
            policy=SchedulerPolicy(max_num_seqs=6, max_num_batched_tokens=40),
            topology=CellTopology(num_ranks),
            num_checkpoint_slots=num_checkpoint_slots,
            state_checkpoint_interval=8,
        )
        self._has_state = num_checkpoint_slots is not None
        self._prompts: list[tuple[bytes, list[int]]] = [(b"", [1])]
        self._next_handle = 1
        self._is_lost: set[int] = set()
        self._is_first_listener_late = self._random.random() < 0.5
        self.seen = Seen()
        if not self._is_first_listener_late:
            self._open()

    def run(self, num_actions: int) -> Seen:
        """Run and compare; the listeners are complete at the end."""
        for number in range(num_actions):
            if number == num_actions // 4 and self._is_first_listener_late:
                self._open()
            if number > num_actions // 4 and self._random.random() < 0.03:
                self._replace_a_listener()
            self._act()
            if number >= num_actions // 4 or not self._is_first_listener_late:
                self._follow()
        self._slices = False
        self._follow()
        self.seen.num_preemptions = self._driver.engine.state().counters.num_preemptions
        return self.seen

    def _open(self) -> None:
        self._feeds = self._driver.engine.open_kv_feeds()
        self._listeners = [[Listener(feed)] for feed in self._feeds]

    def _replace_a_listener(self) -> None:
        """Let another outsider begin to listen; the oldest of three leaves, or all of them at times."""
        if self._random.random() < 0.1:
            self._driver.engine.close_kv_feeds()
            if self._random.random() < 0.5:
                self._act()
            self._open()
            return
        for feed, listeners in zip(self._feeds, self._listeners, strict=True):
            listeners.append(Listener(feed))
            if len(listeners) > 3:
                feed.end_scan(listeners.pop(0).scan)

    def _act(self) -> None:
        actions = [self._step] * 12 + [self._submit] * 5 + [self._abort, self._lose, self._attach, self._not_finite]
        self._random.choice(actions)()
        if self._random.random() < 0.01:
            self._driver.engine.flush_prefix_cache()
            self.seen.num_flushes += 1

    def _submit(self) -> None:
        salt, earlier = self._random.choice(self._prompts[-30:])
        kept = earlier[: self._random.randrange(len(earlier) + 1)]
        prompt = [*kept, *(self._random.randrange(10, 13) for _ in range(self._random.randrange(1, 30)))]
        prompt = prompt[: _CONTEXT - 40]
        if self._random.random() < 0.2:
            salt = self._random.choice(_SALTS)
        self._prompts.append((salt, prompt))
        # Prompt log-probabilities need every position computed, which replaces blocks that hold a content.
        options = SamplingOptions(num_prompt_logprobs=0) if self._random.random() < 0.1 else None
        max_tokens = self._random.randrange(1, 40)
        self._driver.submit(self._next_handle, prompt, cache_salt=salt, max_tokens=max_tokens, options=options)
        self._next_handle += 1

    def _abort(self) -> None:
        self._driver.abort(self._random.randrange(1, self._next_handle + 1))

    def _step(self) -> None:
        ranks = [rank for rank, sent in self._driver.sent_to.items() if sent]
        if ranks:
            self._driver.step(self._random.choice(ranks))

    def _not_finite(self) -> None:
        if self._random.random() < 0.8 or not self._driver.sent_to[0]:
            return
        step = self._driver.sent_to[0].pop(0)
        result = self._driver.workers[0].run(step)
        if step.batch.row_slots.size:
            result = replace(result, not_finite_rows=np.array([0], np.int32))
            self.seen.num_not_finite += 1
        self._driver.now += 1.0
        self._driver.return_result(result)

    def _lose(self) -> None:
        domain = self._random.randrange(self._driver.topology.num_domains)
        if self._random.random() < 0.1 and domain in self._driver.epochs:
            self._driver.lose(domain)
            self.seen.num_losses += 1

    def _attach(self) -> None:
        for domain in range(self._driver.topology.num_domains):
            if domain not in self._driver.epochs:
                self._driver.attach(domain)

    def _follow(self) -> None:
        for rank, (feed, listeners) in enumerate(zip(self._feeds, self._listeners, strict=True)):
            self._advance(feed, listeners)
            held = held_blocks(self._cache(rank), BLOCK_SIZE)
            saved = held_states(self._cache(rank), self._blocks(rank)._states, BLOCK_SIZE)
            self.seen.max_blocks = max(self.seen.max_blocks, len(held))
            for number, listener in enumerate(listeners):
                blocks = listener.index.blocks
                assert blocks.items() <= held.items(), "a block that is not held"
                assert listener.index.states <= saved, "a state that is not saved"
                if listener.scan.is_done and not feed.is_hashing:
                    assert blocks == held, "a block that was not reported"
                    assert listener.index.states == saved, "a state that was not reported"
                    self.seen.num_late_checks += bool(number and held)
                    self.seen.num_states += len(saved)
                    self._compare_usable(rank, listener)

    def _advance(self, feed: KvFeed, listeners: list[Listener]) -> None:
        """As the server does: changes are delivered before a scan goes on."""
        feed.advance(self._budget())
        _deliver(feed, listeners)
        for listener in listeners:
            listener.advance(self._budget())
        _deliver(feed, listeners)

    def _budget(self) -> int:
        return self._random.randrange(6) if self._slices else 10**9

    def _compare_usable(self, rank: int, listener: Listener) -> None:
        """Compare how much of a prompt an outsider takes to be usable with what the scheduler uses."""
        salt, prompt = self._random.choice(self._prompts[-30:])
        num_whole_tokens = len(prompt) // BLOCK_SIZE * BLOCK_SIZE
        salt = salt_of(DEFAULT_TENANT, salt)
        hashes = hash_blocks(hash_salt(salt), token_bytes(prompt[:num_whole_tokens]), 4 * BLOCK_SIZE)
        num_usable = listener.index.num_usable(hashes, has_recurrent_state=self._has_state)
        seq = make_sequence(1, [*prompt, 1])
        seq.cache_salt = salt
        assert self._blocks(rank).num_cached_tokens(seq) == BLOCK_SIZE * num_usable, "what can be used of a prompt"
        self.seen.num_usable += num_usable

    def _blocks(self, rank: int) -> BlockManager:
        return self._driver.engine._cell.ranks[rank].scheduler._blocks

    def _cache(self, rank: int) -> PrefixCache:
        return self._blocks(rank)._prefixes


def _deliver(feed: KvFeed, listeners: list[Listener]) -> None:
    while feed.has_changes:
        changes = feed.take()
        for listener in listeners:
            listener.index.apply(changes)
