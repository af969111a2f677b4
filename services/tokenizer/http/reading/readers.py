"""The functions that read bodies, with the fields that they read.

A process that reads for the service is told their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from services.tokenizer.http.anthropic.request import (
    CountTokensFields,
    MessagesFields,
    read_count_request,
    read_messages_request,
)
from services.tokenizer.http.embeddings.requests import EmbeddingFields, read_embedding_request
from services.tokenizer.http.fields.fields import Fields
from services.tokenizer.http.openai.chat_request import ChatFields, read_chat_request
from services.tokenizer.http.openai.completion_request import CompletionFields, read_completion_request
from services.tokenizer.http.openai.token_requests import (
    DetokenizeFields,
    TokenizeFields,
    read_detokenize_request,
    read_tokenize_request,
)
from services.tokenizer.http.openai_responses.request import ResponseFields, read_response_request
from services.tokenizer.http.scores.requests import (
    ItemScoreFields,
    RerankFields,
    ScoreFields,
    TextRerankFields,
    read_rerank_request,
    read_score_request,
)

FIELDS: Mapping[Callable[..., Any], tuple[type[Fields], ...]] = {
    read_chat_request: (ChatFields,),
    read_completion_request: (CompletionFields,),
    read_count_request: (CountTokensFields,),
    read_detokenize_request: (DetokenizeFields,),
    read_embedding_request: (EmbeddingFields,),
    read_messages_request: (MessagesFields,),
    read_rerank_request: (RerankFields, TextRerankFields),
    read_response_request: (ResponseFields,),
    read_score_request: (ScoreFields, ItemScoreFields),
    read_tokenize_request: (TokenizeFields, ChatFields),
}
"""The forms that a body may have, one or several."""

READERS: Mapping[str, Callable[..., Any]] = {read.__name__: read for read in FIELDS}
