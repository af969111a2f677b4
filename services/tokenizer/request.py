"""From public messages to requests in which everything is checked and resolved.

Cheap checks come first and all of their violations are reported together; how long a list is, is looked at before
anything in it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.chat_template import Message
from shared.errors import InvalidRequestError, ModelNotFoundError, RequestTooLargeError, Violation
from shared.limits import (
    MAX_STOP_TOKEN_IDS,
    MAX_STOP_TOKEN_SEQUENCE_LENGTH,
    MAX_STOP_TOKEN_SEQUENCES,
    TOKEN_DTYPE,
    ModelLimits,
    SamplingParams,
    check_fit,
    check_prompt,
    check_sampling,
    default_max_tokens,
)

MAX_TEXT_BYTES = 3 * 1024 * 1024
MAX_MESSAGES = 1024
MAX_MESSAGE_BYTES = 512 * 1024
MAX_STOP_STRINGS = 8
MAX_STOP_STRING_BYTES = 256
MAX_ALL_STOP_STRINGS_BYTES = 1024

_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

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


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request with a prompt of ids and every parameter resolved; it fits the cell."""

    request_id: str
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    stop_strings: tuple[str, ...]


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
        _check_request_id(request, violations),
        _check_prompt(request, limits, violations),
        _check_sampling(request.sampling, limits, violations),
        request.sampling.HasField("max_tokens"),
        _check_stop_strings(request.stop, violations),
    )
    _raise_any(violations)
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
    sampling = request.sampling
    if not request.has_max_tokens:
        # A prompt without room in the pool is refused as if one token had been asked for.
        max_tokens = max(1, default_max_tokens(prompt_token_ids.size, limits))
        sampling = replace(sampling, max_tokens=max_tokens)
    check_fit(prompt_token_ids.size, sampling.max_tokens, limits)
    return ResolvedRequest(request.request_id, prompt_token_ids.astype(TOKEN_DTYPE), sampling, request.stop_strings)


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
    _raise_any(violations)
    return messages


def _raise_any(violations: Sequence[Violation]) -> None:
    if violations:
        raise InvalidRequestError.from_violations(violations)


def _check_text_bytes(num_bytes: int) -> None:
    if num_bytes > MAX_TEXT_BYTES:
        raise RequestTooLargeError(
            f"the request has {num_bytes} bytes of text, at most {MAX_TEXT_BYTES} are taken",
            limit=MAX_TEXT_BYTES,
            actual=num_bytes,
        )


def _check_request_id(request: tokenizer_pb2.GenerateRequest, violations: list[Violation]) -> str:
    if not request.HasField("request_id"):
        return secrets.token_hex(16)
    if not _REQUEST_ID.fullmatch(request.request_id):
        violations.append(Violation("request_id", "OUT_OF_RANGE", "must be 1 to 64 of A-Z, a-z, 0-9, _ and -"))
    return request.request_id


def _check_prompt(request: tokenizer_pb2.GenerateRequest, limits: ModelLimits, violations: list[Violation]) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind == "chat":
        return _check_messages(request.chat, violations)
    if kind == "tokens":
        return _check_token_ids(request.tokens, limits, violations)
    text = request.text
    check_text(text)
    if kind is None:
        violations.append(Violation("prompt", "PROMPT_EMPTY", "one of text, chat and tokens is needed"))
    elif not text:
        violations.append(Violation("text", "PROMPT_EMPTY", "at least one token is needed"))
    return text


def _check_token_ids(tokens: common_pb2.TokenSequence, limits: ModelLimits, violations: list[Violation]) -> TokenIds:
    # Unsigned until checked: as int32, an id of 2**31 and more would be a negative one.
    token_ids = np.array(tokens.token_ids, np.uint32)
    try:
        check_prompt(token_ids, limits, field="tokens.token_ids")
    except InvalidRequestError as error:
        violations.extend(error.violations)
    return token_ids


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


def _check_sampling(
    sampling: common_pb2.SamplingParams, limits: ModelLimits, violations: list[Violation]
) -> SamplingParams:
    # One more than may be is enough to have a list refused.
    sequences = sampling.stop_token_sequences[: MAX_STOP_TOKEN_SEQUENCES + 1]
    params = SamplingParams(
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else 1,
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=tuple(sampling.stop_token_ids[: MAX_STOP_TOKEN_IDS + 1]),
        stop_token_sequences=tuple(
            tuple(sequence.token_ids[: MAX_STOP_TOKEN_SEQUENCE_LENGTH + 1]) for sequence in sequences
        ),
    )
    try:
        check_sampling(params, limits)
    except InvalidRequestError as error:
        violations.extend(error.violations)
    return params


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
