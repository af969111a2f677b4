"""The functions that read bodies, by the names that a process that reads for the service is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from services.tokenizer.http.messages.request import read_count_request, read_messages_request
from services.tokenizer.http.requests.chat_request import read_chat_request
from services.tokenizer.http.requests.completion_request import read_completion_request
from services.tokenizer.http.requests.token_requests import read_detokenize_request, read_tokenize_request
from services.tokenizer.http.responses.request import read_response_request

READERS: Mapping[str, Callable[..., Any]] = {
    read.__name__: read
    for read in (
        read_chat_request,
        read_completion_request,
        read_count_request,
        read_detokenize_request,
        read_messages_request,
        read_response_request,
        read_tokenize_request,
    )
}
