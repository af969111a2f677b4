"""Turns public messages into checked requests, and these into resolved ones.

Cheap checks come first and report together. A list's length is checked before its items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.chat.chat_request import chat_text_bytes, read_chat
from services.tokenizer.chat.conversation import Conversation
from services.tokenizer.request.resolved_request import ResolvedRequest
from services.tokenizer.scores.score_pair import ScorePair
from services.tokenizer.text_size import check_text_bytes
from shared.errors import InvalidRequestError, ModelNotFoundError, Violation
from shared.request.limits import TOKEN_DTYPE, ModelLimits, check_prompt
from shared.request.request_fields import (
    raise_violations,
    read_cache_salt,
    read_determinism,
    read_num_choices,
    read_priority,
    read_prompt_token_ids,
    read_request_id,
    read_sampling,
    resolve_max_tokens,
)
from shared.request.sampling_params import SamplingParams, check_sampling
from shared.tenants.client_keys import ANY_CLIENT, Client
from shared.tenants.tenant import DEFAULT_TENANT, Tenant

MAX_STOP_STRINGS = 8
MAX_STOP_STRING_BYTES = 256
MAX_ALL_STOP_STRINGS_BYTES = 1024
MAX_BAD_STRINGS = 32
MAX_BAD_STRING_BYTES = 256
MAX_PROMPTS = 64
# Leaves room for the suffix "-63": a prompt's id is the request's id plus its index, within the limit of 64 characters.
MAX_LIST_REQUEST_ID = 61

TokenIds = npt.NDArray[np.integer]
# Text to encode, a conversation or a pair to render, or token ids.
Prompt = str | Conversation | ScorePair | TokenIds


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the answer's text is presented, and what ends it."""

    stop_strings: tuple[str, ...] = ()
    includes_stop: bool = False
    echoes: bool = False
    skips_special_tokens: bool = True
    is_raw: bool = False
    """Whether reasoning and tool calls in a chat reply are left unparsed."""
    is_empty: bool = False
    """Whether nothing of the completion is wanted, only what is known of the prompt."""


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request with acceptable fields; prompts may still have to be encoded."""

    request_id: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    """Without the tokens of `bad_words` and the grammar of `structured_output`. `max_tokens` is only an upper bound
    unless `has_max_tokens`.
    """
    has_max_tokens: bool
    n: int
    form: AnswerForm
    bad_words: tuple[str, ...]
    structured_output: tokenizer_pb2.StructuredOutput | None
    priority: common_pb2.Priority
    cache_salt: bytes
    is_exact: bool
    max_prompt_tokens: int | None = None
    """Only the last ones of a prompt are kept; None means all."""
    tenant: Tenant = DEFAULT_TENANT

    @property
    def all_ids(self) -> list[str]:
        """The ids of the request and its prompts, without duplicates."""
        return list(dict.fromkeys([self.request_id, *self.prompt_ids]))

    @property
    def prompt_ids(self) -> list[str]:
        """Each prompt's request id in the cell."""
        if len(self.prompts) == 1:
            return [self.request_id]
        return [f"{self.request_id}-{index}" for index in range(len(self.prompts))]

    def form_of(self, prompt: Prompt) -> tokenizer_pb2.StructuredOutput | None:
        """The form of a prompt's answer; None where a tool must be called, so that there is no text to have it."""
        return None if _must_call(prompt) else self.structured_output

    def field_prefix(self, index: int) -> str:
        """The prefix of a prompt's fields in violations."""
        return "" if len(self.prompts) == 1 else f"prompts.prompts[{index}]."


def check_request(
    request: tokenizer_pb2.GenerateRequest,
    *,
    model_name: str,
    limits: ModelLimits,
    defaults: common_pb2.SamplingParams | None = None,
    client: Client = ANY_CLIENT,
) -> CheckedRequest:
    """Check what can be checked before encoding; draws the id and seed if not given.

    Raises:
        PermissionDeniedError: it has a higher priority than its client may ask for.
        ModelNotFoundError: it names another model.
        RequestTooLargeError: its texts exceed the limit.
        PromptTooLongError: its token ids leave no room for one more.
        InvalidRequestError: names the first bad fields.
    """
    priority = client.resolve_priority(request.priority)
    if request.HasField("model") and request.model != model_name:
        raise ModelNotFoundError.from_name(request.model, [model_name])
    violations: list[Violation] = []
    request_id = read_request_id(request.request_id if request.HasField("request_id") else None, violations)
    prompts = _check_prompts(request, limits, violations)
    if len(prompts) > 1 and len(request_id) > MAX_LIST_REQUEST_ID:
        description = f"must have at most {MAX_LIST_REQUEST_ID} characters in a request with several prompts"
        violations.append(Violation("request_id", "OUT_OF_RANGE", description))
    form = _check_form(request, violations)
    checked = CheckedRequest(
        request_id,
        prompts,
        read_sampling(_computed(request.sampling, form), limits, violations, defaults=defaults),
        request.sampling.HasField("max_tokens"),
        read_num_choices(request.sampling, violations),
        form,
        _check_bad_words(request.bad_words, violations),
        request.structured_output if request.HasField("structured_output") else None,
        read_priority(priority, violations),
        read_cache_salt(request.cache_salt, violations),
        read_determinism(request.determinism, violations),
        request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None,
        client.tenant,
    )
    client.check_num_choices(checked.n, len(prompts), violations)
    if checked.max_prompt_tokens == 0:
        violations.append(Violation("truncate_prompt_tokens", "OUT_OF_RANGE", "must be at least 1"))
    _check_constraints(checked, violations)
    raise_violations(violations)
    return checked


def resolve_request(
    request: CheckedRequest, index: int, prompt_token_ids: TokenIds, sampling: SamplingParams, limits: ModelLimits
) -> ResolvedRequest:
    """Resolve one prompt of a request, including what depends on its length.

    Args:
        prompt_token_ids: [num_prompt_tokens], any integer dtype.
        sampling: With the tokens of the bad words and the prompt's grammar.

    Raises:
        InvalidRequestError: the prompt is empty, or the model does not know a token of it or of a bad word.
        PromptTooLongError, ContextExceededError, KvCapacityExceededError: it does not fit.
    """
    field = f"{request.field_prefix(index)}prompt"
    if isinstance(request.prompts[index], str | Conversation | ScorePair):
        _check_known(prompt_token_ids, limits.logits_width, field)
    check_prompt(prompt_token_ids, limits, field=field)
    # The parts that it got since `check_request`.
    if sampling is not request.sampling:
        check_sampling(sampling, limits)
    sampling = resolve_max_tokens(sampling, prompt_token_ids.size, limits, has_max_tokens=request.has_max_tokens)
    prompt = prompt_token_ids.astype(TOKEN_DTYPE).tobytes()
    return ResolvedRequest(
        request.prompt_ids[index],
        prompt,
        sampling,
        request.priority,
        request.cache_salt,
        request.n,
        is_exact=request.is_exact,
        tenant=request.tenant,
    )


def _must_call(prompt: Prompt) -> bool:
    """Whether the answer must call a tool."""
    return isinstance(prompt, Conversation) and bool(prompt.callable_tools)


def _check_known(token_ids: TokenIds, logits_width: int, field: str) -> None:
    """Refuse a text with a token of the tokenizer that the model does not know."""
    if token_ids.size and (token_id := int(token_ids.max())) >= logits_width:
        description = f"it contains the tokenizer's token {token_id}, but the model only knows ids below {logits_width}"
        raise InvalidRequestError.from_violations([Violation(field, "TOKEN_ID_OUT_OF_RANGE", description)])


def _check_prompts(
    request: tokenizer_pb2.GenerateRequest, limits: ModelLimits, violations: list[Violation]
) -> tuple[Prompt, ...]:
    check_text_bytes(text_bytes(request))
    # 0 is refused.
    kept = request.truncate_prompt_tokens
    if request.WhichOneof("prompt") != "prompts":
        return (_check_prompt(request, "", kept, limits, violations),)
    return check_prompt_list(request.prompts.prompts, limits, violations, num_kept=kept)


def check_prompt_list(
    prompts: Sequence[tokenizer_pb2.Prompt],
    limits: ModelLimits,
    violations: list[Violation],
    *,
    num_kept: int = 0,
    most: int = MAX_PROMPTS,
) -> tuple[Prompt, ...]:
    """Check the prompts of a list; none are returned if there are more than `most`, or none.

    `num_kept` is the number of tokens that are kept of each, 0 for all.
    """
    if not 1 <= len(prompts) <= most:
        violations.append(Violation("prompts.prompts", "OUT_OF_RANGE", f"must have 1 to {most} prompts"))
        return ()
    return tuple(
        _check_prompt(prompt, f"prompts.prompts[{index}].", num_kept, limits, violations)
        for index, prompt in enumerate(prompts)
    )


def text_bytes(message: tokenizer_pb2.GenerateRequest | tokenizer_pb2.Prompt) -> int:
    """The bytes of a request's or a prompt's texts, those of a list's first prompts."""
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return len(message.text.encode())
    if kind == "chat":
        return chat_text_bytes(message.chat)
    if isinstance(message, tokenizer_pb2.GenerateRequest) and kind == "prompts":
        return sum(map(text_bytes, message.prompts.prompts[:MAX_PROMPTS]))
    return 0


def _check_prompt(
    message: tokenizer_pb2.GenerateRequest | tokenizer_pb2.Prompt,
    prefix: str,
    num_kept: int,
    limits: ModelLimits,
    violations: list[Violation],
) -> Prompt:
    kind = message.WhichOneof("prompt")
    if kind == "chat":
        return read_chat(message.chat, violations, field=f"{prefix}chat")
    if kind == "tokens":
        token_ids: Sequence[int] = message.tokens.token_ids
        if 0 < num_kept < limits.context_length:
            token_ids = token_ids[-num_kept:]
        return read_prompt_token_ids(token_ids, limits, violations, field=f"{prefix}tokens.token_ids")
    if kind is None:
        violations.append(Violation(f"{prefix}prompt", "PROMPT_EMPTY", "one of text, chat and tokens must be set"))
    elif not message.text:
        violations.append(Violation(f"{prefix}text", "PROMPT_EMPTY", "must not be empty"))
    return message.text


def _check_form(request: tokenizer_pb2.GenerateRequest, violations: list[Violation]) -> AnswerForm:
    sampling = request.sampling
    tells_of_prompt = request.echo or sampling.HasField("num_prompt_logprobs")
    return AnswerForm(
        _check_stop_strings(request.stop, violations),
        includes_stop=request.include_stop,
        echoes=request.echo,
        skips_special_tokens=request.skip_special_tokens or not request.HasField("skip_special_tokens"),
        is_raw=request.raw_text,
        is_empty=sampling.HasField("max_tokens") and not sampling.max_tokens and tells_of_prompt,
    )


def _computed(sampling: common_pb2.SamplingParams, form: AnswerForm) -> common_pb2.SamplingParams:
    """The parameters for the cell, which computes at least one token."""
    if not form.is_empty:
        return sampling
    computed = common_pb2.SamplingParams()
    computed.CopyFrom(sampling)
    computed.max_tokens = 1
    return computed


def _check_stop_strings(stops: Sequence[str], violations: list[Violation]) -> tuple[str, ...]:
    if len(stops) > MAX_STOP_STRINGS:
        violations.append(Violation("stop", "OUT_OF_RANGE", f"must have at most {MAX_STOP_STRINGS} strings"))
        return ()
    sizes = [len(stop.encode()) for stop in stops]
    for index, size in enumerate(sizes):
        if not 1 <= size <= MAX_STOP_STRING_BYTES:
            description = f"must have 1 to {MAX_STOP_STRING_BYTES} bytes"
            violations.append(Violation(f"stop[{index}]", "OUT_OF_RANGE", description))
    if sum(sizes) > MAX_ALL_STOP_STRINGS_BYTES:
        violations.append(
            Violation("stop", "OUT_OF_RANGE", f"must have at most {MAX_ALL_STOP_STRINGS_BYTES} bytes in total")
        )
    return tuple(stops)


def _check_bad_words(words: Sequence[str], violations: list[Violation]) -> tuple[str, ...]:
    if len(words) > MAX_BAD_STRINGS:
        violations.append(Violation("bad_words", "OUT_OF_RANGE", f"must have at most {MAX_BAD_STRINGS} strings"))
        return ()
    for index, word in enumerate(words):
        # A leading space is added, or removed, when the word is spelled.
        if not word.strip() or len(word.encode()) > MAX_BAD_STRING_BYTES:
            description = f"must have 1 to {MAX_BAD_STRING_BYTES} bytes, and not only whitespace"
            violations.append(Violation(f"bad_words[{index}]", "OUT_OF_RANGE", description))
    return tuple(words)


def _check_constraints(request: CheckedRequest, violations: list[Violation]) -> None:
    """Refuse options that contradict structured output or required tool calls."""
    has_calls = any(map(_must_call, request.prompts))
    if request.sampling.ignore_eos and (request.structured_output is not None or has_calls):
        description = "cannot be combined with structured_output or required tool calls, which end the text"
        violations.append(Violation("sampling.ignore_eos", "OUT_OF_RANGE", description))
