"""What calls of many items share: each is a request of its own to the cell, and few of them are there at once."""

from __future__ import annotations

from dataclasses import replace

from google.protobuf.message import Message

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.answer.request_totals import RequestTotals
from services.tokenizer.answer.whole_answer import WholeAnswer
from services.tokenizer.exchange.scheduler_client import SchedulerClient
from services.tokenizer.request.model import ServedModel
from services.tokenizer.server.generate import CallTerms, Check, GenerateCall
from services.tokenizer.server.live_requests import LiveRequests
from shared.tenants.tenant import Tenant

MAX_IN_FLIGHT = 32
"""How many items of a call are in the cell at once: more would fill the queue for all others."""


class ItemsCall:
    """Has the cell compute the items of one call."""

    def __init__(
        self, model: ServedModel, scheduler: SchedulerClient, live: LiveRequests, *, totals: RequestTotals
    ) -> None:
        self.model = model
        self._scheduler = scheduler
        self._live = live
        self._totals = totals

    async def answer(self, request: Message, check: Check, terms: CallTerms) -> tokenizer_pb2.CompleteResponse:
        """The answers to all items, in order.

        Raises:
            ServiceError: the request was refused, or an item ended with an error.
        """
        # Thousands of items are far smaller than a message may be.
        answer = WholeAnswer(max_bytes=None)
        terms = replace(terms, max_in_flight=_window(terms.client.tenant))
        call = GenerateCall(self.model, self._scheduler, self._live, answer, totals=self._totals, terms=terms)
        await call.serve(request, check)
        return answer.message()


def request_id_of(whole: tokenizer_pb2.CompleteResponse) -> str:
    """The id of a request with these answers."""
    first_id = whole.prompts[0].accepted.request_id
    return first_id if len(whole.prompts) == 1 else first_id.removesuffix("-0")


def _window(tenant: Tenant) -> int:
    """How many items may be in the cell at once: not more than the tenant may have there, or have waiting."""
    limits = (tenant.max_in_flight, tenant.max_waiting_requests)
    return min([MAX_IN_FLIGHT, *(limit for limit in limits if limit is not None)])
