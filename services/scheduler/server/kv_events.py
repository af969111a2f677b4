"""The streams that tell gateways which KV blocks the ranks hold; see `kv_feed` for how.

While no one subscribes, nothing is noted, hashed or sent. Otherwise the work is done in *slices* between the events of
the engine: changes are hashed and queued for every subscriber, then the snapshots that are not complete go on. A slice
takes about 0.4 ms, and the next one begins five times as long after it, so steps are hardly delayed however much there
is to tell.

A response with changes is made once for all subscribers, and each has a queue of its own. One whose queue is full loses
its stream. Its snapshot goes on only while the queue is short, so a large pool alone does not fill it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import grpc

from lockstep.v1 import scheduler_pb2
from services.scheduler.cell.engine import Engine
from services.scheduler.core.batch.sequence import TOKEN_BYTES
from services.scheduler.core.cache.kv_changes import KvChanges
from services.scheduler.core.cache.kv_feed import KvFeed, KvScan
from shared.errors import ClientTooSlowError, InternalError, QueueFullError, ServiceError

logger = logging.getLogger(__name__)

Response = scheduler_pb2.SubscribeKvEventsResponse
Write = Callable[[Response], Awaitable[None]]

MAX_SUBSCRIBERS = 16
# What a queue may hold in blocks, about 1.5 MB as sent; and what it may hold while a snapshot goes on.
MAX_QUEUED_BLOCKS = 131_072
_MAX_QUEUED_IN_SNAPSHOT = 8192
# What a response counts for besides its blocks.
_RESPONSE_BLOCKS = 16
_SLICE_S = 0.0004
_PAUSE_S = 0.002
# The most work between two looks at the clock: a tenth of a millisecond.
_MAX_BLOCKS_AT_ONCE = 512
_MAX_BYTES_AT_ONCE = 131_072
_RETRY_DELAY_S = 1.0


@dataclass(slots=True, eq=False)
class _RankFeed:
    """A rank's feed, and the number of the last change sent."""

    rank: int
    feed: KvFeed
    sequence_number: int = 0


class Subscriber:
    """One stream: its unsent responses, and its snapshots that are not complete."""

    def __init__(self, feeds: list[_RankFeed], max_queued_blocks: int) -> None:
        self.scans: dict[_RankFeed, KvScan] = {rank_feed: rank_feed.feed.scan() for rank_feed in feeds}
        self.error: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()
        """What the stream ends with, once that is known."""
        self._queue: asyncio.Queue[tuple[Response, int]] = asyncio.Queue()
        self._num_queued_blocks = 0
        self._max_queued_blocks = max_queued_blocks

    @property
    def wants_snapshot(self) -> bool:
        """Whether there is more of a snapshot to send, and room for it."""
        return bool(self.scans) and self._num_queued_blocks < _MAX_QUEUED_IN_SNAPSHOT and not self.error.done()

    def send(self, response: Response, num_blocks: int) -> None:
        """Queue a response about so many blocks; a full queue ends the stream."""
        if self.error.done():
            return
        size = num_blocks + _RESPONSE_BLOCKS
        if self._num_queued_blocks + size > self._max_queued_blocks:
            logger.info("a subscriber to KV events reads too slowly")
            self.end(ClientTooSlowError("the subscriber reads too slowly; it may subscribe again"))
            return
        self._num_queued_blocks += size
        self._queue.put_nowait((response, size))

    def end(self, error: ServiceError) -> None:
        """End the stream with an error, without what is queued."""
        if not self.error.done():
            self.error.set_result(error)

    async def next_response(self) -> Response:
        """Take the next response."""
        response, size = await self._queue.get()
        self._num_queued_blocks -= size
        return response


class KvEvents:
    """The subscribers of a cell, and the slices of work for them."""

    def __init__(self, engine: Engine, *, max_queued_blocks: int = MAX_QUEUED_BLOCKS) -> None:
        """Make it in the running event loop.

        Args:
            engine: Its ranks have feeds while there are subscribers.
            max_queued_blocks: What a subscriber's queue may hold.
        """
        self._engine = engine
        self._block_size = engine.state().block_size
        self._blocks_at_once = max(1, min(_MAX_BLOCKS_AT_ONCE, _MAX_BYTES_AT_ONCE // (TOKEN_BYTES * self._block_size)))
        self._max_queued_blocks = max_queued_blocks
        self._loop = asyncio.get_running_loop()
        self._feeds: deque[_RankFeed] = deque()
        self._subscribers: deque[Subscriber] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._next_slice_at = 0.0
        # The error for new subscribers, once closed.
        self._end: ServiceError | None = None

    async def stream(self, write: Write) -> None:
        """Serve a subscriber until its call is cancelled, or over.

        Raises:
            ServiceError: there are too many subscribers, or its stream was ended.
        """
        subscriber = self._subscribe()
        writing = asyncio.create_task(self._write(subscriber, write))
        try:
            await asyncio.wait((writing, subscriber.error), return_when=asyncio.FIRST_COMPLETED)
        finally:
            writing.cancel()
            self._unsubscribe(subscriber)
        if subscriber.error.done():
            raise subscriber.error.result()
        await writing

    def wake(self) -> None:
        """Do a slice as soon as one may be done, if there is work; call it after each event of the engine."""
        if self._subscribers and self._timer is None and self._has_work():
            self._timer = self._loop.call_at(max(self._next_slice_at, self._loop.time()), self._on_timer)

    def close(self, error: ServiceError) -> None:
        """End every stream with an error; later subscribers get it at once."""
        self._end = error
        for subscriber in self._subscribers:
            subscriber.end(error)

    def _subscribe(self) -> Subscriber:
        if self._end is not None:
            raise self._end
        if len(self._subscribers) == MAX_SUBSCRIBERS:
            raise QueueFullError(
                "too many subscribers to KV events", retry_delay_s=_RETRY_DELAY_S, max_subscribers=MAX_SUBSCRIBERS
            )
        if not self._subscribers:
            self._feeds.extend(_RankFeed(rank, feed) for rank, feed in enumerate(self._engine.open_kv_feeds()))
        subscriber = Subscriber(list(self._feeds), self._max_queued_blocks)
        self._subscribers.append(subscriber)
        self.wake()
        return subscriber

    def _unsubscribe(self, subscriber: Subscriber) -> None:
        for rank_feed, scan in subscriber.scans.items():
            rank_feed.feed.end_scan(scan)
        self._subscribers.remove(subscriber)
        if not self._subscribers:
            self._engine.close_kv_feeds()
            self._feeds.clear()

    async def _write(self, subscriber: Subscriber, write: Write) -> None:
        # An error of gRPC means that the stream is over, of which the handler is notified as well.
        with suppress(grpc.aio.BaseError):
            while True:
                await write(await subscriber.next_response())
                # Its snapshot may have waited for room.
                self.wake()

    def _has_work(self) -> bool:
        return any(rank_feed.feed.is_hashing or rank_feed.feed.has_changes for rank_feed in self._feeds) or any(
            subscriber.wants_snapshot for subscriber in self._subscribers
        )

    def _on_timer(self) -> None:
        self._timer = None
        try:
            self._do_slice(self._loop.time() + _SLICE_S)
        except Exception:
            logger.exception("the streams of KV events end: a bug")
            for subscriber in self._subscribers:
                subscriber.end(InternalError("internal error"))
        self._next_slice_at = self._loop.time() + _PAUSE_S
        self.wake()

    def _do_slice(self, deadline: float) -> None:
        # Another rank and another subscriber are the first each time, in case there is no time for all.
        self._feeds.rotate()
        self._subscribers.rotate()
        for rank_feed in self._feeds:
            feed = rank_feed.feed
            while (feed.is_hashing or feed.has_changes) and self._loop.time() < deadline:
                feed.advance(self._blocks_at_once)
                while feed.has_changes and self._loop.time() < deadline:
                    self._send_changes(rank_feed)
        for subscriber in self._subscribers:
            for rank_feed in [rank_feed for rank_feed in self._feeds if rank_feed in subscriber.scans]:
                if subscriber.wants_snapshot and self._loop.time() < deadline:
                    self._continue_snapshot(subscriber, rank_feed)

    def _send_changes(self, rank_feed: _RankFeed) -> None:
        changes = rank_feed.feed.take()
        rank_feed.sequence_number += 1
        response = self._make_response(rank_feed, changes)
        for subscriber in self._subscribers:
            subscriber.send(response, changes.num_blocks)

    def _continue_snapshot(self, subscriber: Subscriber, rank_feed: _RankFeed) -> None:
        if rank_feed.feed.has_changes:
            # The scan finds what is held now, so these come first.
            return
        scan = subscriber.scans[rank_feed]
        changes = KvChanges(stored=scan.advance(self._blocks_at_once))
        while rank_feed.feed.has_changes:
            # What the scan hashed.
            self._send_changes(rank_feed)
        if scan.is_done:
            del subscriber.scans[rank_feed]
            rank_feed.feed.end_scan(scan)
        if scan.is_done or changes.num_blocks:
            response = self._make_response(rank_feed, changes)
            response.snapshot_complete = scan.is_done
            subscriber.send(response, changes.num_blocks)

    def _make_response(self, rank_feed: _RankFeed, changes: KvChanges) -> Response:
        return Response(
            dp_rank=rank_feed.rank,
            sequence_number=rank_feed.sequence_number,
            block_size=self._block_size,
            all_cleared=changes.is_cleared,
            removed_hashes=[block_hash for hashes in changes.removed for block_hash in hashes.tolist()],
            stored_hashes=changes.stored.hashes,
            run_lengths=changes.stored.num_blocks,
            run_parent_hashes=changes.stored.parents,
            run_starts=changes.stored.starts,
            removed_state_hashes=changes.removed_states,
            stored_state_hashes=changes.stored.states,
            has_recurrent_state=rank_feed.feed.states is not None,
        )
