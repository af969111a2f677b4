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
from services.tokenizer.chat.chat_request import chat_text_bytes, read_chat
from services.tokenizer.chat.conversation import Conversation
from services.tokenizer.request.resolved_request import ResolvedRequest
from services.tokenizer.text_size import check_text_bytes
from shared.errors import InvalidRequestError, ModelNotFoundError, Violation
from shared.limits import TOKEN_DTYPE, ModelLimits, SamplingParams, check_prompt
from shared.request_fields import (
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

MAX_STOP_STRINGS = 8
MAX_STOP_STRING_BYTES = 256
MAX_ALL_STOP_STRINGS_BYTES = 1024
MAX_BAD_STRINGS = 32
MAX_BAD_STRING_BYTES = 256
MAX_PROMPTS = 64
# Behind it comes the number of a prompt, within the 64 characters that an id may have.
MAX_LIST_REQUEST_ID = 61

TokenIds = npt.NDArray[np.integer]
# Text to encode, a conversation to render, or ids.
Prompt = str | Conversation | TokenIds


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What the answer's text is to look like, and where it ends."""

    stop_strings: tuple[str, ...] = ()
    includes_stop: bool = False
    echoes: bool = False
    skips_special_tokens: bool = True
    is_raw: bool = False
    """Whether the reply to a conversation is not taken apart."""


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request in which every field is acceptable; its prompts may still have to be encoded.

    `sampling.max_tokens` is only the most that it may become unless `has_max_tokens`. The tokens of `bad_words` and the
    grammar of `structured_output` are not in `sampling` yet.
    """

    request_id: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    has_max_tokens: bool
    n: int
    form: AnswerForm
    bad_words: tuple[str, ...]
    structured_output: tokenizer_pb2.StructuredOutput | None
    priority: common_pb2.Priority
    cache_salt: bytes
    is_exact: bool

    @property
    def all_ids(self) -> list[str]:
        """Its own id, and those of its prompts."""
        return list(dict.fromkeys([self.request_id, *self.prompt_ids]))

    @property
    def prompt_ids(self) -> list[str]:
        """What the cell knows each prompt by."""
        if len(self.prompts) == 1:
            return [self.request_id]
        return [f"{self.request_id}-{index}" for index in range(len(self.prompts))]

    def field_prefix(self, index: int) -> str:
        """What stands before the fields of a prompt where a violation names them."""
        return "" if len(self.prompts) == 1 else f"prompts.prompts[{index}]."


def check_request(
    request: tokenizer_pb2.GenerateRequest,
    *,
    model_name: str,
    limits: ModelLimits,
    defaults: common_pb2.SamplingParams | None = None,
) -> CheckedRequest:
    """Check everything that can be checked before the prompts are encoded; draw what the request leaves to us.

    Args:
        request: The request.
        model_name: The served model's.
        limits: The cell's.
        defaults: The model's own sampling parameters.

    Raises:
        ModelNotFoundError: it names another model.
        RequestTooLargeError: its text is larger than one request's may be.
        PromptTooLongError: its token ids leave no room for one more.
        InvalidRequestError: naming the first bad fields.
    """
    if request.HasField("model") and request.model != model_name:
        raise ModelNotFoundError("this model is not served here", served_model=model_name)
    violations: list[Violation] = []
    request_id = read_request_id(request.request_id if request.HasField("request_id") else None, violations)
    prompts = _check_prompts(request, limits, violations)
    if len(prompts) > 1 and len(request_id) > MAX_LIST_REQUEST_ID:
        description = f"at most {MAX_LIST_REQUEST_ID} characters with several prompts"
        violations.append(Violation("request_id", "OUT_OF_RANGE", description))
    checked = CheckedRequest(
        request_id,
        prompts,
        read_sampling(request.sampling, limits, violations, defaults=defaults),
        request.sampling.HasField("max_tokens"),
        read_num_choices(request.sampling, violations),
        _check_form(request, violations),
        _check_bad_words(request.bad_words, violations),
        request.structured_output if request.HasField("structured_output") else None,
        read_priority(request.priority, violations),
        read_cache_salt(request.cache_salt, violations),
        read_determinism(request.determinism, violations),
    )
    _check_constraints(checked, violations)
    raise_violations(violations)
    return checked


def resolve_request(
    request: CheckedRequest, index: int, prompt_token_ids: TokenIds, sampling: SamplingParams, limits: ModelLimits
) -> ResolvedRequest:
    """Put one encoded prompt in, and resolve what depends on its length.

    Args:
        request: A checked request.
        index: Which of its prompts it is.
        prompt_token_ids: [num_prompt_tokens], any integer dtype.
        sampling: The request's, with tokens of bad words and the prompt's grammar.
        limits: The cell's.

    Raises:
        InvalidRequestError: the prompt has no token, or one that the model does not know.
        PromptTooLongError, ContextExceededError, KvCapacityExceededError: it does not fit.
    """
    field = f"{request.field_prefix(index)}prompt"
    if isinstance(request.prompts[index], str | Conversation):
        _check_known(prompt_token_ids, limits.logits_width, field)
    check_prompt(prompt_token_ids, limits, field=field)
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
    )


def _check_known(token_ids: TokenIds, logits_width: int, field: str) -> None:
    """Refuse a text for which the tokenizer has a token that the model has not.

    Raises:
        InvalidRequestError: it is such a text.
    """
    if token_ids.size and (token_id := int(token_ids.max())) >= logits_width:
        description = f"the tokenizer makes token {token_id} of it, and the model knows only ids below {logits_width}"
        raise InvalidRequestError.from_violations([Violation(field, "TOKEN_ID_OUT_OF_RANGE", description)])


def _check_prompts(
    request: tokenizer_pb2.GenerateRequest, limits: ModelLimits, violations: list[Violation]
) -> tuple[Prompt, ...]:
    check_text_bytes(_text_bytes(request))
    if request.WhichOneof("prompt") != "prompts":
        return (_check_prompt(request, "", limits, violations),)
    prompts = request.prompts.prompts
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        violations.append(Violation("prompts.prompts", "OUT_OF_RANGE", f"must have 1 to {MAX_PROMPTS} prompts"))
        return ()
    return tuple(
        _check_prompt(prompt, f"prompts.prompts[{index}].", limits, violations) for index, prompt in enumerate(prompts)
    )


def _text_bytes(message: tokenizer_pb2.GenerateRequest | tokenizer_pb2.Prompt) -> int:
    """The bytes of all text that a message's prompts bring."""
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return len(message.text.encode())
    if kind == "chat":
        return chat_text_bytes(message.chat)
    if isinstance(message, tokenizer_pb2.GenerateRequest) and kind == "prompts":
        return sum(map(_text_bytes, message.prompts.prompts))
    return 0


def _check_prompt(
    message: tokenizer_pb2.GenerateRequest | tokenizer_pb2.Prompt,
    prefix: str,
    limits: ModelLimits,
    violations: list[Violation],
) -> Prompt:
    """The prompt of a message that has one; what is wrong with it joins `violations`, each field behind `prefix`."""
    kind = message.WhichOneof("prompt")
    if kind == "chat":
        return read_chat(message.chat, violations, field=f"{prefix}chat")
    if kind == "tokens":
        field = f"{prefix}tokens.token_ids"
        return read_prompt_token_ids(message.tokens.token_ids, limits, violations, field=field)
    if kind is None:
        violations.append(Violation(f"{prefix}prompt", "PROMPT_EMPTY", "one of text, chat and tokens is needed"))
    elif not message.text:
        violations.append(Violation(f"{prefix}text", "PROMPT_EMPTY", "at least one token is needed"))
    return message.text


def _check_form(request: tokenizer_pb2.GenerateRequest, violations: list[Violation]) -> AnswerForm:
    return AnswerForm(
        _check_stop_strings(request.stop, violations),
        includes_stop=request.include_stop,
        echoes=request.echo,
        skips_special_tokens=request.skip_special_tokens or not request.HasField("skip_special_tokens"),
        is_raw=request.raw_text,
    )


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


def _check_bad_words(words: Sequence[str], violations: list[Violation]) -> tuple[str, ...]:
    if len(words) > MAX_BAD_STRINGS:
        violations.append(Violation("bad_words", "OUT_OF_RANGE", f"at most {MAX_BAD_STRINGS} strings"))
        return ()
    for index, word in enumerate(words):
        # The space before a word is ours to add.
        if not word.strip() or len(word.encode()) > MAX_BAD_STRING_BYTES:
            description = f"must have 1 to {MAX_BAD_STRING_BYTES} bytes, and not only space"
            violations.append(Violation(f"bad_words[{index}]", "OUT_OF_RANGE", description))
    return tuple(words)


def _check_constraints(request: CheckedRequest, violations: list[Violation]) -> None:
    """Refuse what cannot hold together with a text that is constrained."""
    has_calls = any(isinstance(prompt, Conversation) and prompt.callable_tools for prompt in request.prompts)
    if request.structured_output is not None and has_calls:
        violations.append(Violation("structured_output", "OUT_OF_RANGE", "not with tools that must be called"))
    if request.sampling.ignore_eos and (request.structured_output is not None or has_calls):
        description = "not with structured_output, nor with tools that must be called: they end the text"
        violations.append(Violation("sampling.ignore_eos", "OUT_OF_RANGE", description))
