"""From public messages to requests in which everything is checked and resolved.

Cheap checks come first and all of their violations are reported together; how long a list is, is looked at before
anything in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.chat_template import Message
from services.tokenizer.request_ledger import ResolvedRequest
from shared.errors import ModelNotFoundError, RequestTooLargeError, Violation
from shared.limits import TOKEN_DTYPE, ModelLimits, SamplingParams, check_prompt
from shared.request_fields import (
    raise_violations,
    read_cache_salt,
    read_priority,
    read_prompt_token_ids,
    read_request_id,
    read_sampling,
    resolve_max_tokens,
)

MAX_TEXT_BYTES = 3 * 1024 * 1024
MAX_MESSAGES = 1024
MAX_MESSAGE_BYTES = 512 * 1024
MAX_STOP_STRINGS = 8
MAX_STOP_STRING_BYTES = 256
MAX_ALL_STOP_STRINGS_BYTES = 1024

_ROLE_NAMES: dict[int, str] = {
    tokenizer_pb2.ROLE_SYSTEM: "system",
    tokenizer_pb2.ROLE_USER: "user",
    tokenizer_pb2.ROLE_ASSISTANT: "assistant",
}

TokenIds = npt.NDArray[np.integer]
# Text to encode, a conversation to render, or ids.
Prompt = str | tuple[Message, ...] | TokenIds


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request in which every field is acceptable; its prompt may still have to be encoded.

    `sampling.max_tokens` counts only when `has_max_tokens`.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    has_max_tokens: bool
    stop_strings: tuple[str, ...]
    priority: common_pb2.Priority
    cache_salt: bytes


def check_request(request: tokenizer_pb2.GenerateRequest, *, model_name: str, limits: ModelLimits) -> CheckedRequest:
    """Check everything that can be checked before the prompt is encoded; draw what the request leaves to us.

    Raises:
        ModelNotFoundError: it names another model.
        RequestTooLargeError: its text is larger than one request's may be.
        PromptTooLongError: its token ids leave no room for one more.
        InvalidRequestError: naming the first bad fields.
    """
    if request.HasField("model") and request.model != model_name:
        raise ModelNotFoundError("this model is not served here", served_model=model_name)
    violations: list[Violation] = []
    checked = CheckedRequest(
        read_request_id(request.request_id if request.HasField("request_id") else None, violations),
        _check_prompt(request, limits, violations),
        read_sampling(request.sampling, limits, violations),
        request.sampling.HasField("max_tokens"),
        _check_stop_strings(request.stop, violations),
        read_priority(request.priority, violations),
        read_cache_salt(request.cache_salt, violations),
    )
    raise_violations(violations)
    return checked


def resolve_request(request: CheckedRequest, prompt_token_ids: TokenIds, limits: ModelLimits) -> ResolvedRequest:
    """Put the encoded prompt in, and resolve what depends on its length.

    Args:
        request: A checked request.
        prompt_token_ids: [num_prompt_tokens], any integer dtype.
        limits: The cell's.

    Raises:
        InvalidRequestError: the prompt has no token, or one that the model does not know.
        PromptTooLongError, ContextExceededError, KvCapacityExceededError: it does not fit.
    """
    check_prompt(prompt_token_ids, limits)
    sampling = resolve_max_tokens(
        request.sampling, prompt_token_ids.size, limits, has_max_tokens=request.has_max_tokens
    )
    prompt = prompt_token_ids.astype(TOKEN_DTYPE).tobytes()
    return ResolvedRequest(request.request_id, prompt, sampling, request.priority, request.cache_salt)


def check_text(text: str) -> None:
    """Refuse a text that is larger than one request's may be.

    Raises:
        RequestTooLargeError: above 3 MiB of UTF-8.
    """
    _check_text_bytes(len(text.encode()))


def check_chat(chat: tokenizer_pb2.Chat) -> tuple[Message, ...]:
    """The messages of a conversation.

    Raises:
        RequestTooLargeError: all contents together are above 3 MiB of UTF-8.
        InvalidRequestError: naming the first bad messages.
    """
    violations: list[Violation] = []
    messages = _check_messages(chat, violations)
    raise_violations(violations)
    return messages


def _check_text_bytes(num_bytes: int) -> None:
    if num_bytes > MAX_TEXT_BYTES:
        raise RequestTooLargeError(
            f"the request has {num_bytes} bytes of text, at most {MAX_TEXT_BYTES} are taken",
            limit=MAX_TEXT_BYTES,
            actual=num_bytes,
        )


def _check_prompt(request: tokenizer_pb2.GenerateRequest, limits: ModelLimits, violations: list[Violation]) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind == "chat":
        return _check_messages(request.chat, violations)
    if kind == "tokens":
        return read_prompt_token_ids(request.tokens.token_ids, limits, violations, field="tokens.token_ids")
    text = request.text
    check_text(text)
    if kind is None:
        violations.append(Violation("prompt", "PROMPT_EMPTY", "one of text, chat and tokens is needed"))
    elif not text:
        violations.append(Violation("text", "PROMPT_EMPTY", "at least one token is needed"))
    return text


def _check_messages(chat: tokenizer_pb2.Chat, violations: list[Violation]) -> tuple[Message, ...]:
    if not 1 <= len(chat.messages) <= MAX_MESSAGES:
        violations.append(Violation("chat.messages", "OUT_OF_RANGE", f"must have 1 to {MAX_MESSAGES} messages"))
        return ()
    messages = []
    num_bytes = 0
    for index, message in enumerate(chat.messages):
        role, content = _ROLE_NAMES.get(message.role), message.content
        size = len(content.encode())
        num_bytes += size
        if role is None:
            description = "must be ROLE_SYSTEM, ROLE_USER or ROLE_ASSISTANT"
            violations.append(Violation(f"chat.messages[{index}].role", "OUT_OF_RANGE", description))
        if size > MAX_MESSAGE_BYTES:
            description = f"at most {MAX_MESSAGE_BYTES} bytes"
            violations.append(Violation(f"chat.messages[{index}].content", "OUT_OF_RANGE", description))
        messages.append(Message(role or "", content))
    _check_text_bytes(num_bytes)
    return tuple(messages)


def _check_stop_strings(stops: Sequence[str], violations: list[Violation]) -> tuple[str, ...]:
    if len(stops) > MAX_STOP_STRINGS:
        violations.append(Violation("stop", "OUT_OF_RANGE", f"at most {MAX_STOP_STRINGS} strings"))
        return ()
    sizes = [len(stop.encode()) for stop in stops]
    for index, size in enumerate(sizes):
        if not 1 <= size <= MAX_STOP_STRING_BYTES:
            description = f"must have 1 to {MAX_STOP_STRING_BYTES} bytes"
            violations.append(Violation(f"stop[{index}]", "OUT_OF_RANGE", description))
    if sum(sizes) > MAX_ALL_STOP_STRINGS_BYTES:
        violations.append(Violation("stop", "OUT_OF_RANGE", f"at most {MAX_ALL_STOP_STRINGS_BYTES} bytes in all"))
    return tuple(stops)
