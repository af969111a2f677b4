"""JSON schemas of the answers, for the API's description."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
NULL: Schema = {"type": "null"}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {"type": "object", "required": list(required), "properties": required | (optional or {})}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _one_of(*values: str | None) -> Schema:
    return {"enum": list(values)}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


_TOKEN_IDS = _list(COUNT)
_FINISH_REASON = _one_of("stop", "length", "tool_calls")
_STOP_REASON: Schema = {"type": ["string", "integer", "null"]}
_TOKEN = _object({"token": TEXT, "logprob": NUMBER, "bytes": _or_null(_list(COUNT))})
_CHAT_LOGPROBS = _object(
    {
        "content": _or_null(
            _list(_object({**_TOKEN["properties"], "top_logprobs": _list(_TOKEN)})),
        ),
    },
    {"refusal": NULL},
)
_COMPLETION_LOGPROBS = _object(
    {
        "tokens": _list(TEXT),
        "token_logprobs": _list(_or_null(NUMBER)),
        "top_logprobs": _list(_or_null({"type": "object", "additionalProperties": NUMBER})),
        "text_offset": _list(COUNT),
    }
)
_PROMPT_LOGPROBS = _list(
    _or_null(
        {
            "type": "object",
            "additionalProperties": _object({"logprob": NUMBER, "rank": COUNT, "decoded_token": TEXT}),
        }
    )
)
_CALL: Schema = {
    "anyOf": [
        _object({"id": TEXT, "type": _one_of("function"), "function": _object({"name": TEXT, "arguments": TEXT})}),
        _object({"id": TEXT, "type": _one_of("custom"), "custom": _object({"name": TEXT, "input": TEXT})}),
    ]
}
_MESSAGE = _object(
    {"role": _one_of("assistant"), "content": _or_null(TEXT)},
    {"refusal": NULL, "reasoning": TEXT, "reasoning_content": TEXT, "tool_calls": _list(_CALL)},
)
_USAGE = _object(
    {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
    {
        "prompt_tokens_details": _object({"cached_tokens": COUNT}),
        "completion_tokens_details": _object({"reasoning_tokens": COUNT}),
    },
)
_SCORES: Schema = {
    "anyOf": [
        _object(
            {
                "id": TEXT,
                "object": _one_of("list"),
                "created": COUNT,
                "model": TEXT,
                "data": _list(_object({"index": COUNT, "object": _one_of("score"), "score": NUMBER})),
                "usage": _USAGE,
            }
        ),
        _object({"object": _one_of("scoring"), "scores": _list(_list(NUMBER)), "model": TEXT, "usage": _USAGE}),
    ]
}
_RANKS: Schema = {
    "anyOf": [
        _object(
            {
                "id": TEXT,
                "model": TEXT,
                "results": _list(
                    _object({"index": COUNT, "relevance_score": NUMBER}, {"document": _object({"text": TEXT})})
                ),
                "usage": _USAGE,
            }
        ),
        _list(_object({"index": COUNT, "score": NUMBER}, {"text": TEXT})),
    ]
}
_RECOVERY = _object({"seed": COUNT, "resume_count": COUNT, "resume_exact": {"type": "boolean"}})


def _answer(kind: str, choice: Schema, optional: dict[str, Schema]) -> Schema:
    return _object(
        {
            "id": TEXT,
            "object": _one_of(kind),
            "created": COUNT,
            "model": TEXT,
            "choices": _list(choice),
            "usage": _USAGE,
            "system_fingerprint": TEXT,
            "lockstep": _RECOVERY,
        },
        optional,
    )


_RESPONSE_USAGE = _object(
    {
        "input_tokens": COUNT,
        "input_tokens_details": _object({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": _object({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    }
)
_ITEM = _object({"id": TEXT, "type": _one_of("message", "reasoning", "function_call", "custom_tool_call")})
_END = {"finish_reason": _FINISH_REASON, "stop_reason": _STOP_REASON}
_MODEL = _object(
    {"id": TEXT, "object": _one_of("model"), "created": COUNT, "owned_by": TEXT, "max_model_len": COUNT},
    # vLLM's, and whose code computes the model.
    {"root": TEXT, "parent": NULL, "implementation": TEXT},
)

_BLOCK: Schema = {
    "anyOf": [
        _object({"type": _one_of("text"), "text": TEXT}),
        _object({"type": _one_of("thinking"), "thinking": TEXT, "signature": TEXT}),
        _object({"type": _one_of("tool_use"), "id": TEXT, "name": TEXT, "input": {"type": "object"}}),
    ]
}
_MESSAGE_USAGE = _object(
    {
        "input_tokens": COUNT,
        "cache_creation_input_tokens": COUNT,
        "cache_read_input_tokens": COUNT,
        "output_tokens": COUNT,
        "output_tokens_details": _object({"thinking_tokens": COUNT}),
    },
    {"service_tier": _one_of("standard")},
)

ANSWERS: dict[str, Schema] = {
    "ChatAnswer": _answer(
        "chat.completion",
        _object(
            {"index": COUNT, "message": _MESSAGE, "logprobs": _or_null(_CHAT_LOGPROBS), **_END},
            {"token_ids": _TOKEN_IDS},
        ),
        {"prompt_logprobs": _PROMPT_LOGPROBS, "prompt_token_ids": _TOKEN_IDS},
    ),
    "CompletionAnswer": _answer(
        "text_completion",
        _object(
            {"index": COUNT, "text": TEXT, "logprobs": _or_null(_COMPLETION_LOGPROBS), **_END},
            {"token_ids": _TOKEN_IDS, "prompt_token_ids": _TOKEN_IDS, "prompt_logprobs": _PROMPT_LOGPROBS},
        ),
        {},
    ),
    "MessageAnswer": _object(
        {
            "id": TEXT,
            "type": _one_of("message"),
            "role": _one_of("assistant"),
            "model": TEXT,
            "content": _list(_BLOCK),
            "stop_reason": _one_of(
                "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
            ),
            "stop_sequence": _or_null(TEXT),
            "usage": _MESSAGE_USAGE,
        }
    ),
    "TokenCount": _object({"input_tokens": COUNT}),
    "InputTokens": _object({"object": _one_of("response.input_tokens"), "input_tokens": COUNT}),
    "ResponseAnswer": _object(
        {
            "id": TEXT,
            "object": _one_of("response"),
            "created_at": COUNT,
            "model": TEXT,
            "status": _one_of("completed", "incomplete"),
            "output": _list(_ITEM),
            "usage": _RESPONSE_USAGE,
            "system_fingerprint": TEXT,
            "lockstep": _RECOVERY,
        },
        {"incomplete_details": _or_null(_object({"reason": _one_of("max_output_tokens")}))},
    ),
    "RenderedPrompts": _object(
        {"model": TEXT, "prompts": _list(_object({"prompt": TEXT, "prompt_token_ids": _TOKEN_IDS}))}
    ),
    "Tokens": _object(
        {"count": COUNT, "max_model_len": COUNT, "tokens": _TOKEN_IDS, "token_strs": _or_null(_list(TEXT))}
    ),
    "Scores": _SCORES,
    "Ranks": _RANKS,
    "Embeddings": _object(
        {
            "object": _one_of("list"),
            "data": _list(
                _object(
                    {
                        "object": _one_of("embedding"),
                        "index": COUNT,
                        "embedding": {"anyOf": [_list(NUMBER), TEXT]},
                    }
                )
            ),
            "model": TEXT,
            "usage": _object({"prompt_tokens": COUNT, "total_tokens": COUNT}, {"prompt_tokens_details": {}}),
        }
    ),
    "DecodedTokens": _object({"prompt": TEXT}),
    "Model": _MODEL,
    "Models": _object({"object": _one_of("list"), "data": _list(_MODEL)}),
    "Release": _object({"version": TEXT}),
    "Error": _object(
        {"error": _object({"message": TEXT, "type": TEXT, "param": {"type": ["string", "null"]}, "code": TEXT})}
    ),
    "MessageError": _object(
        {"type": _one_of("error"), "error": _object({"type": TEXT, "message": TEXT}), "request_id": TEXT}
    ),
}
"""Schemas by the names that the description gives them."""


STATE: Schema = {
    "type": "object",
    "description": "`lockstep.v1.GetStateResponse` of scheduler.proto, in protobuf's JSON form.",
}
"""Among the answers only where it is served."""


def error_statuses(others: Sequence[int]) -> list[int]:
    """Statuses of the errors that every route has, with others, in order."""
    return sorted({400, 403, 431, 500, *others})
