"""The course of one `Score` call: one token of each item, and what becomes of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.request.score_checks import check_score, labels_of
from services.tokenizer.server.generate import CallTerms
from services.tokenizer.server.items import MAX_IN_FLIGHT, ItemsCall, request_id_of

__all__ = ["MAX_IN_FLIGHT", "ScoreCall"]


class ScoreCall(ItemsCall):
    """Serves one call."""

    async def serve(self, request: tokenizer_pb2.ScoreRequest, terms: CallTerms) -> tokenizer_pb2.ScoreResponse:
        """Rate all items.

        Raises:
            ServiceError: the request was refused, or an item ended with an error.
        """
        scores = self.model.scores
        whole = await self.answer(request, partial(check_score, scores=scores), terms)
        return tokenizer_pb2.ScoreResponse(
            items=_items(whole, over_vocabulary=request.over_vocabulary),
            usage=whole.usage,
            request_id=request_id_of(whole),
            model=self.model.name,
            label_token_ids=labels_of(request, scores),
        )


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
