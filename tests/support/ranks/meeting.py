"""A meeting of ranks that are told where to meet, without RPCs."""

from __future__ import annotations

from dataclasses import replace

from services.worker.parallel.rendezvous import Rendezvous, open_rendezvous
from shared.network.addresses import split_address


def meet_at(store: str, start_id: str, *, is_first: bool) -> Rendezvous:
    """What a rank knows when all have been told the store's HOST:PORT and the id of the start; the first serves it."""
    if not is_first:
        return Rendezvous(start_id, store)
    return replace(open_rendezvous(*split_address(store)), start_id=start_id)
