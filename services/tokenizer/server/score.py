"""The course of one `Score` call: a `GenerateCall` for one token of each item, and what becomes of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.answer.request_totals import RequestTotals
from services.tokenizer.answer.whole_answer import WholeAnswer
from services.tokenizer.exchange.scheduler_client import SchedulerClient
from services.tokenizer.request.model import ServedModel
from services.tokenizer.request.score_checks import check_score, labels_of
from services.tokenizer.server.generate import CallTerms, GenerateCall
from services.tokenizer.server.live_requests import LiveRequests
from shared.tenants.tenant import Tenant

MAX_IN_FLIGHT = 32
"""How many items of a call are in the cell at once: more would fill the queue for all others."""


class ScoreCall:
    """Serves one call."""

    def __init__(
        self, model: ServedModel, scheduler: SchedulerClient, live: LiveRequests, *, totals: RequestTotals
    ) -> None:
        self._model = model
        self._scheduler = scheduler
        self._live = live
        self._totals = totals

    async def serve(self, request: tokenizer_pb2.ScoreRequest, terms: CallTerms) -> tokenizer_pb2.ScoreResponse:
        """Rate all items.

        Raises:
            ServiceError: the request was refused, or an item ended with an error.
        """
        # 1,000 items are far smaller than a message may be.
        answer = WholeAnswer(max_bytes=None)
        terms = replace(terms, max_in_flight=_window(terms.client.tenant))
        call = GenerateCall(self._model, self._scheduler, self._live, answer, totals=self._totals, terms=terms)
        await call.serve(request, partial(check_score, scores=self._model.scores))
        whole = answer.message()
        first_id = whole.prompts[0].accepted.request_id
        return tokenizer_pb2.ScoreResponse(
            items=_items(whole, over_vocabulary=request.over_vocabulary),
            usage=whole.usage,
            request_id=first_id if len(whole.prompts) == 1 else first_id.removesuffix("-0"),
            model=self._model.name,
            label_token_ids=labels_of(request, self._model.scores),
        )


def _window(tenant: Tenant) -> int:
    """How many items may be in the cell at once: not more than the tenant may have there, or have waiting."""
    limits = (tenant.max_in_flight, tenant.max_waiting_requests)
    return min([MAX_IN_FLIGHT, *(limit for limit in limits if limit is not None)])


def _items(whole: tokenizer_pb2.CompleteResponse, *, over_vocabulary: bool) -> Iterator[tokenizer_pb2.ScoredItem]:
    for choice in whole.choices:
        logprobs = [entry.logprob for entry in choice.logprobs[0].requested]
        probabilities = [math.exp(each) for each in logprobs] if over_vocabulary else _softmax(logprobs)
        yield tokenizer_pb2.ScoredItem(
            score=probabilities[0],
            probabilities=probabilities,
            logprobs=logprobs,
            usage=choice.finish.usage,
            recovery=choice.finish.recovery if choice.finish.HasField("recovery") else None,
        )


def _softmax(logprobs: Sequence[float]) -> list[float]:
    most = max(logprobs)
    weights = [math.exp(each - most) for each in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
