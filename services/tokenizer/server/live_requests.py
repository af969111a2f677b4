"""The requests in flight, by tenant and id."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from services.tokenizer.answer.answer import Generation
from shared.errors import DrainingError, DuplicateRequestError

logger = logging.getLogger(__name__)

_CUT = (
    "the service is stopping before the answer has ended; another one goes on with it where it is the last message of "
    "a chat with continue_final_message, or the end of a prompt"
)


class LiveRequests:
    """Claims request ids, and drains the requests when the service stops.

    Invariant: an id is here, with its tenant's name, from its admission until its request has ended.
    """

    def __init__(self) -> None:
        self._generations: dict[tuple[str, str], Generation | None] = {}
        self._is_draining = False
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def check_open(self) -> None:
        """Raise `DrainingError` once the service is stopping."""
        if self._is_draining:
            raise DrainingError("the service is stopping")

    @contextmanager
    def admit(self, tenant: str, request_ids: Sequence[str]) -> Iterator[None]:
        """Claim ids of a tenant, all or none, inside the `with` block; the first is the request's own.

        Raises:
            DuplicateRequestError: a request of the tenant with one of these ids is in flight.
        """
        for request_id in request_ids:
            if (tenant, request_id) in self._generations:
                raise DuplicateRequestError("a request with this id is in flight", request_id=request_id)
        self._generations.update(((tenant, request_id), None) for request_id in request_ids)
        self._is_empty.clear()
        try:
            yield
        finally:
            for request_id in request_ids:
                del self._generations[tenant, request_id]
            if not self._generations:
                self._is_empty.set()

    def begin(self, tenant: str, request_id: str, generation: Generation) -> None:
        """An admitted request's answer has begun."""
        self._generations[tenant, request_id] = generation

    async def drain(self, drain_s: float, is_urgent: asyncio.Event) -> int:
        """Refuse new requests and let those in flight finish; ends the rest with DRAINING.

        The rest is what is left after `drain_s`, or when `is_urgent` is set.

        Returns:
            The number of the rest.
        """
        self._is_draining = True
        if not self._is_empty.is_set():
            logger.info("draining", extra={"num_requests": len(self._generations), "drain_s": drain_s})
        ends = [asyncio.create_task(event.wait()) for event in (self._is_empty, is_urgent)]
        await asyncio.wait(ends, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        for generation in self._generations.values():
            if generation is not None:
                generation.fail(DrainingError(_CUT))
        return len(self._generations)
