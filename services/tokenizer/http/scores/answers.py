"""What the routes that score and rank answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.scores.requests import RatingRequest
from services.tokenizer.http.streams.answer_facts import usage_value

Ratings = tokenizer_pb2.ScoreResponse


def rating_value(asked: RatingRequest, ratings: Ratings, model: str) -> Any:
    """The answer to a request, in its form; `model` is the name that answers have."""
    return RATING_FORMS[asked.form](asked, ratings, model)


def _scores(asked: RatingRequest, ratings: Ratings, model: str) -> Any:
    """vLLM's."""
    data = [
        {"index": index, "object": "score", "score": _score(item, asked)} for index, item in enumerate(ratings.items)
    ]
    return {
        "id": f"score-{ratings.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": usage_value(ratings.usage),
    }


def _labels(_asked: RatingRequest, ratings: Ratings, model: str) -> Any:
    """SGLang's."""
    scores = [list(item.probabilities) for item in ratings.items]
    return {"object": "scoring", "scores": scores, "model": model, "usage": usage_value(ratings.usage)}


def _ranks(asked: RatingRequest, ratings: Ratings, model: str) -> Any:
    """Jina's and vLLM's; Cohere's has less."""
    results = []
    for index, score in _ranked(asked, ratings):
        result: dict[str, Any] = {"index": index, "relevance_score": score}
        if asked.has_documents:
            result["document"] = {"text": asked.message.pairs.documents[index]}
        results.append(result)
    return {
        "id": f"rerank-{ratings.request_id}",
        "model": model,
        "results": results,
        "usage": usage_value(ratings.usage),
    }


def _texts(asked: RatingRequest, ratings: Ratings, _model: str) -> Any:
    """TEI's."""
    return [
        {"index": index, "score": score}
        | ({"text": asked.message.pairs.documents[index]} if asked.has_documents else {})
        for index, score in _ranked(asked, ratings)
    ]


def _ranked(asked: RatingRequest, ratings: Ratings) -> list[tuple[int, float]]:
    """Indices and scores, the best first; equal ones in the request's order."""
    scores = [_score(item, asked) for item in ratings.items]
    # Not by the probabilities: those of good documents may all be 1.
    order = sorted(range(len(scores)), key=lambda index: -_log_odds(ratings.items[index]))
    return [(index, scores[index]) for index in order[: asked.most]]


def _score(item: tokenizer_pb2.ScoredItem, asked: RatingRequest) -> float:
    return _log_odds(item) if asked.is_raw else item.score


def _log_odds(item: tokenizer_pb2.ScoredItem) -> float:
    """The difference of the two labels' logits."""
    return item.logprobs[0] - item.logprobs[1]


RATING_FORMS: Mapping[str, Callable[[RatingRequest, Ratings, str], Any]] = {
    "scores": _scores,
    "labels": _labels,
    "ranks": _ranks,
    "texts": _texts,
}
