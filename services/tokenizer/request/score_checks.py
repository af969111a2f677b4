"""Turns a `ScoreRequest` into a checked request, each of whose prompts asks for one token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.request.checks import CheckedRequest, Prompt, check_prompt_list, text_bytes
from services.tokenizer.request.item_checks import ItemChecks
from services.tokenizer.scores.recipe import Scores
from services.tokenizer.text_size import MAX_ITEMS, check_text_bytes
from shared.errors import InvalidRequestError, Violation
from shared.request.limits import ModelLimits, check_token_ids
from shared.request.request_fields import raise_violations, read_sampling
from shared.request.sampling_params import MAX_LOGPROBS
from shared.tenants.client_keys import ANY_CLIENT, Client

# What is drawn is not looked at, and must not end the choice without log-probabilities.
_ONE_TOKEN = common_pb2.SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)


def labels_of(request: tokenizer_pb2.ScoreRequest, scores: Scores) -> list[int]:
    """The labels of a request, the recipe's for pairs."""
    if request.WhichOneof("items") != "pairs":
        return list(request.label_token_ids)
    return [] if scores.recipe is None else list(scores.recipe.label_token_ids)


def check_score(
    request: tokenizer_pb2.ScoreRequest,
    *,
    model_name: str,
    limits: ModelLimits,
    scores: Scores,
    defaults: common_pb2.SamplingParams | None = None,  # noqa: ARG001 - nothing is sampled by a model's defaults
    client: Client = ANY_CLIENT,
) -> CheckedRequest:
    """Check what can be checked before encoding; as `check_request`, and raises as it does."""
    items = ItemChecks(request, model_name, client, most_items=MAX_ITEMS)
    prompts = _check_items(request, scores, limits, items.violations)
    items.violations += _label_violations(request, limits)
    raise_violations(items.violations)
    sampling = common_pb2.SamplingParams(logprob_token_ids=labels_of(request, scores))
    sampling.MergeFrom(_ONE_TOKEN)
    return items.checked(prompts, read_sampling(sampling, limits, items.violations))


def _check_items(
    request: tokenizer_pb2.ScoreRequest, scores: Scores, limits: ModelLimits, violations: list[Violation]
) -> tuple[Prompt, ...]:
    kind = request.WhichOneof("items")
    if kind == "prompts":
        prompts = request.prompts.prompts
        check_text_bytes(sum(map(text_bytes, prompts[:MAX_ITEMS])))
        return check_prompt_list(prompts, limits, violations, most=MAX_ITEMS)
    if kind is None:
        violations.append(Violation("items", "PROMPT_EMPTY", "one of pairs and prompts must be set"))
        return ()
    pairs, recipe = request.pairs, scores.recipe
    if recipe is None:
        violations.append(Violation("pairs", "OUT_OF_RANGE", scores.problem))
        return ()
    violations += _pair_violations(pairs)
    if pairs.instruction and not recipe.takes_instruction:
        violations.append(Violation("pairs.instruction", "OUT_OF_RANGE", "must be empty: the recipe does not show it"))
    if violations:
        return ()
    queries = list(pairs.queries) * (len(pairs.documents) if len(pairs.queries) == 1 else 1)
    check_text_bytes(_text_bytes(pairs))
    return tuple(
        recipe.pair(query, document, pairs.instruction)
        for query, document in zip(queries, pairs.documents, strict=True)
    )


def _pair_violations(pairs: tokenizer_pb2.ScorePairs) -> Iterator[Violation]:
    num_queries, num_documents = len(pairs.queries), len(pairs.documents)
    if not 1 <= num_documents <= MAX_ITEMS:
        yield Violation("pairs.documents", "OUT_OF_RANGE", f"must have 1 to {MAX_ITEMS} documents")
        return
    if num_queries not in (1, num_documents):
        yield Violation("pairs.queries", "OUT_OF_RANGE", "must have one query, or one for each document")
        return
    for field, texts in (("queries", pairs.queries), ("documents", pairs.documents)):
        for index, text in enumerate(texts):
            if not text:
                yield Violation(f"pairs.{field}[{index}]", "PROMPT_EMPTY", "must not be empty")


def _text_bytes(pairs: tokenizer_pb2.ScorePairs) -> int:
    """The text of all prompts, to which a query and an instruction belong that were sent once."""
    num_repeats = len(pairs.documents) // len(pairs.queries)
    queries, documents = (sum(len(text.encode()) for text in texts) for texts in (pairs.queries, pairs.documents))
    return queries * num_repeats + documents + len(pairs.instruction.encode()) * len(pairs.documents)


def _label_violations(request: tokenizer_pb2.ScoreRequest, limits: ModelLimits) -> Iterator[Violation]:
    field, labels = "label_token_ids", request.label_token_ids
    if request.WhichOneof("items") != "prompts":
        if labels:
            yield Violation(field, "OUT_OF_RANGE", "must be empty without prompts: a recipe has labels of its own")
        return
    fewest = 1 if request.over_vocabulary else 2
    if not fewest <= len(labels) <= MAX_LOGPROBS:
        hint = "" if request.over_vocabulary else ": one label alone is rated by its raw logit, which is not returned"
        yield Violation(field, "OUT_OF_RANGE", f"must have {fewest} to {MAX_LOGPROBS} tokens{hint}")
        return
    if len(set(labels)) < len(labels):
        yield Violation(field, "OUT_OF_RANGE", "must have no token twice")
    try:
        check_token_ids(np.array(labels, np.uint32), limits.logits_width, field=field)
    except InvalidRequestError as error:
        yield from error.violations
