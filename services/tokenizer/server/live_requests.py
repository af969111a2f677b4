"""The requests in flight, by id."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from services.tokenizer.server.generation import Generation
from shared.errors import DrainingError, DuplicateRequestError


class LiveRequests:
    """Claims request ids, and drains the requests when the service stops.

    Invariant: an id is here from its admission until its request has ended.
    """

    def __init__(self) -> None:
        self._generations: dict[str, Generation | None] = {}
        self._is_draining = False
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def check_open(self) -> None:
        """Raise `DrainingError` once the service is stopping."""
        if self._is_draining:
            raise DrainingError("the service is stopping")

    @contextmanager
    def admit(self, request_ids: Sequence[str]) -> Iterator[None]:
        """Claim ids, all or none, inside the `with` block; the first is the request's own.

        Raises:
            DuplicateRequestError: a request with one of these ids is in flight.
        """
        for request_id in request_ids:
            if request_id in self._generations:
                raise DuplicateRequestError("a request with this id is in flight", request_id=request_id)
        self._generations.update(dict.fromkeys(request_ids))
        self._is_empty.clear()
        try:
            yield
        finally:
            for request_id in request_ids:
                del self._generations[request_id]
            if not self._generations:
                self._is_empty.set()

    def begin(self, request_id: str, generation: Generation) -> None:
        """An admitted request's answer has begun."""
        self._generations[request_id] = generation

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let those in flight finish, and end the rest with DRAINING after `grace_s`."""
        self._is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._is_empty.wait()
        except TimeoutError:
            for generation in self._generations.values():
                if generation is not None:
                    generation.fail(DrainingError("the service is stopping"))
