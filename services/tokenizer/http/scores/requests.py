"""Reads the bodies of the routes that score and rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.http.fields.fields import Count, Fields, Several, Whole, read_request
from services.tokenizer.http.fields.sampling_fields import Seconds, priority_of
from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.json.json_values import JsonObject
from services.tokenizer.text_size import MAX_ITEMS
from shared.request.sampling_params import MAX_LOGPROBS

_ID_LIMIT = 2**32


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_texts(value: object) -> object:
    """Documents, of which some clients send objects with their text."""
    if not isinstance(value, list):
        return value
    return [each["text"] if isinstance(each, dict) and each.keys() == {"text"} else each for each in value]


def _as_part(value: object) -> str | list[int]:
    """Checked here, since an error of a union of types would name them in the field's place."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        ids = [int(each) if isinstance(each, float) and each.is_integer() else each for each in value]
        if all(type(each) is int and 0 <= each < _ID_LIMIT for each in ids):
            return ids
    raise ValueError("must be a text, or a list of token ids")


_Part = Annotated[str | list[int], PlainValidator(_as_part, json_schema_input_type=str | list[int])]
_Items = Annotated[Several[str], Field(max_length=MAX_ITEMS)]
_Texts = Annotated[_Items, BeforeValidator(_as_list, json_schema_input_type=str | list[str])]
_Documents = Annotated[
    _Items, BeforeValidator(_as_texts, json_schema_input_type=list[str | dict[Literal["text"], str]])
]
_Parts = Annotated[
    Several[_Part],
    Field(max_length=MAX_ITEMS),
    BeforeValidator(_as_list, json_schema_input_type=str | list[str | list[int]]),
]


class RatingFields(Fields):
    """What all bodies share."""

    model: str | None = None
    instruction: str | None = None
    priority: Whole | None = None
    cache_salt: str | None = None
    determinism: Literal["ordinary", "exact"] | None = None
    timeout_s: Seconds | None = None


class ScoreFields(RatingFields):
    """vLLM's body of a score: one text against others, or pairs of them."""

    text_1: _Texts
    text_2: _Texts
    use_activation: bool | None = None


class ItemScoreFields(RatingFields):
    """SGLang's body of a score: a prompt's beginning and its ends, rated by labels."""

    query: _Part
    items: _Parts
    label_token_ids: Annotated[Several[Count], Field(max_length=MAX_LOGPROBS)]
    apply_softmax: bool | None = None
    item_first: bool | None = None


class RerankFields(RatingFields):
    """Jina's, Cohere's and vLLM's body of a rank."""

    query: str
    documents: _Documents
    top_n: Count | None = None
    return_documents: bool | None = None
    truncation: Literal[False] | None = None


class TextRerankFields(RatingFields):
    """TEI's body of a rank."""

    query: str
    texts: _Items
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: Literal[False] | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None


@dataclass(frozen=True, slots=True)
class RatingNames:
    """Names the fields of a `ScoreRequest` in the JSON of one body."""

    query: str
    documents: str
    has_one_query: bool = True

    def __call__(self, name: str) -> str:
        """The name in the request's JSON."""
        name = re.sub(r"^prompts\.prompts(\[\d+\])?.*", r"pairs.documents\1", name)
        if name.startswith("pairs.queries"):
            return self.query if self.has_one_query else self.query + name.removeprefix("pairs.queries")
        if name in ("pairs", "prompt", "items") or name.startswith("pairs.documents"):
            return self.documents + name.partition("documents")[2]
        return name.removeprefix("pairs.")


@dataclass(frozen=True, slots=True)
class RatingRequest:
    """A body, read: what to rate, and how the answer is to look."""

    message: tokenizer_pb2.ScoreRequest
    names: RatingNames
    form: str
    """The answer's, a key of `RATING_FORMS`."""
    model: str | None = None
    """The model's name as the client gave it; None if it did not."""
    timeout_s: float | None = None
    ignored: list[str] = field(default_factory=list)
    """Names of fields that have no effect."""
    is_raw: bool = False
    """Whether scores are differences of logits instead of probabilities."""
    has_documents: bool = False
    """Whether ranks have the texts."""
    most: int | None = None
    """How many ranks are wanted; None means all."""


def read_score_request(value: JsonObject, request_id: str, *, is_lenient: bool = False) -> RatingRequest:
    """Read a request, which the cell knows by `request_id`; `is_lenient` as for `read_request`.

    Raises:
        HttpError: names the first field that is wrong, unknown, or cannot be honoured.
    """
    if value.get("items") is not None or value.get("label_token_ids") is not None:
        return _read_items(value, request_id, is_lenient=is_lenient)
    fields, ignored = read_request(ScoreFields, value, is_lenient=is_lenient)
    one, others = fields.text_1, fields.text_2
    if len(one) not in (1, len(others)):
        raise invalid_field("text_1", "must be one text, or as many as text_2 has")
    message = _message(fields, request_id)
    message.pairs.CopyFrom(_pairs(one, others, fields.instruction))
    names = RatingNames("text_1", "text_2", has_one_query=isinstance(value.get("text_1"), str))
    is_raw = fields.use_activation is False
    return RatingRequest(message, names, "scores", fields.model, fields.timeout_s, ignored, is_raw=is_raw)


def read_rerank_request(value: JsonObject, request_id: str, *, is_lenient: bool = False) -> RatingRequest:
    """Read a request; as `read_score_request`."""
    if value.get("texts") is not None:
        texts, ignored = read_request(TextRerankFields, value, is_lenient=is_lenient)
        message = _message(texts, request_id)
        message.pairs.CopyFrom(_pairs([texts.query], texts.texts, texts.instruction))
        names = RatingNames("query", "texts")
        return RatingRequest(
            message,
            names,
            "texts",
            texts.model,
            texts.timeout_s,
            ignored,
            is_raw=bool(texts.raw_scores),
            has_documents=bool(texts.return_text),
        )
    fields, ignored = read_request(RerankFields, value, is_lenient=is_lenient)
    message = _message(fields, request_id)
    message.pairs.CopyFrom(_pairs([fields.query], fields.documents, fields.instruction))
    return RatingRequest(
        message,
        RatingNames("query", "documents"),
        "ranks",
        fields.model,
        fields.timeout_s,
        ignored,
        has_documents=fields.return_documents is not False,
        most=fields.top_n or None,
    )


def _read_items(value: JsonObject, request_id: str, *, is_lenient: bool) -> RatingRequest:
    fields, ignored = read_request(ItemScoreFields, value, is_lenient=is_lenient)
    if fields.instruction is not None:
        raise invalid_field("instruction", "must be in the query: it is the prompt's beginning")
    message = _message(fields, request_id)
    message.label_token_ids.extend(fields.label_token_ids)
    message.over_vocabulary = not fields.apply_softmax
    for index, item in enumerate(fields.items):
        parts = (item, fields.query) if fields.item_first else (fields.query, item)
        message.prompts.prompts.append(_joined(*parts, index))
    if not fields.items:
        message.prompts.SetInParent()
    return RatingRequest(message, RatingNames("query", "items"), "labels", fields.model, fields.timeout_s, ignored)


def _joined(first: str | list[int], second: str | list[int], index: int) -> tokenizer_pb2.Prompt:
    if isinstance(first, str) and isinstance(second, str):
        return tokenizer_pb2.Prompt(text=first + second)
    if isinstance(first, str) or isinstance(second, str):
        raise invalid_field(f"items[{index}]", "must be what the query is: a text, or token ids")
    return tokenizer_pb2.Prompt(tokens=common_pb2.TokenSequence(token_ids=first + second))


def _pairs(queries: Sequence[str], documents: Sequence[str], instruction: str | None) -> tokenizer_pb2.ScorePairs:
    return tokenizer_pb2.ScorePairs(queries=queries, documents=documents, instruction=instruction)


def _message(fields: RatingFields, request_id: str) -> tokenizer_pb2.ScoreRequest:
    message = tokenizer_pb2.ScoreRequest(
        request_id=request_id, priority=priority_of(fields.priority or 0), cache_salt=fields.cache_salt
    )
    if fields.determinism == "exact":
        message.determinism = common_pb2.DETERMINISM_EXACT
    return message
