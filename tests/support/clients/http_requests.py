"""Requests that mean the same over HTTP and gRPC, each written in both forms."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.v1 import common_pb2, tokenizer_pb2
from tests.support.clients.http_answers import CHAT, COMPLETION
from tests.support.pairwise import pairwise_rows

_TOKENS_OF_CALLS = 5
# The number of seeds; others are folded into them.
SEEDS = 2**64
_ROLES = {
    "developer": tokenizer_pb2.ROLE_SYSTEM,
    "user": tokenizer_pb2.ROLE_USER,
    "assistant": tokenizer_pb2.ROLE_ASSISTANT,
}


@dataclass(frozen=True)
class Both:
    """Some fields of a request: in the JSON, in the message's sampling parameters, and in the message itself."""

    body: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TwinRequest:
    """The same request twice."""

    path: str
    body: dict[str, Any]
    message: tokenizer_pb2.GenerateRequest

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        count: int = self.message.sampling.n
        return count or 1

    @property
    def streamed_body(self) -> dict[str, Any]:
        """The JSON without what is refused in a stream."""
        return {name: value for name, value in self.body.items() if name != "prompt_logprobs"}


NOTHING = Both()

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
_REGEX, _CHOICES, _LARK = "[a-z]{3,12}( [a-z]+){0,2}", ["yes", "no", "perhaps"], 'start: "a" /[0-9]{1,4}/ "z"'
_PARAMETERS = {"type": "object", "properties": {"a": {"enum": ["x", 1.5]}}, "required": ["a"]}
_NAMES = ("look", "find")
_OPENAI_TOOLS = [{"type": "function", "function": {"name": name, "parameters": _PARAMETERS}} for name in _NAMES]
_ANTHROPIC_TOOLS = [{"name": name, "input_schema": _PARAMETERS} for name in _NAMES]
_TOOLS = [{"name": name, "parameters": json.dumps(_PARAMETERS)} for name in _NAMES]


def _same(**fields: Any) -> Both:
    """Sampling parameters with the same names and values in both forms."""
    return Both(fields, fields)


def _form(body: dict[str, Any], form: dict[str, Any]) -> Both:
    return Both(body, fields={"structured_output": form})


# Values that may occur in every request, by the option; the first one is the default.
OPTIONS: dict[str, tuple[Both, ...]] = {
    "temperature": (_same(temperature=0.0), _same(temperature=1.0), _same(temperature=1.5)),
    "seed": (_same(seed=7), Both({"seed": -2}, {"seed": SEEDS - 2}), Both({"seed": SEEDS + 5}, {"seed": 5})),
    "top_k": (NOTHING, _same(top_k=20), Both({"top_k": -1}, {"top_k": 0})),
    # 0 leaves only the likeliest token.
    "top_p": (NOTHING, _same(top_p=0.8), Both({"top_p": 0}, {"top_k": 1})),
    "min_p": (NOTHING, _same(min_p=0.03)),
    "penalties": (NOTHING, _same(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.25)),
    # The last value has the tokens that open and close the tiny model's reasoning.
    "logit_bias": (
        NOTHING,
        Both({"logit_bias": {"300": 5.0, "7": -100}}, {"logit_bias": {300: 5.0, 7: -100.0}}),
        Both({"logit_bias": {"420": 6.5, "421": 8.0}}, {"logit_bias": {420: 6.5, 421: 8.0}}),
    ),
    "bad_words": (NOTHING, Both({"bad_words": ["a", "the"]}, fields={"bad_words": ["a", "the"]})),
    "stop": (
        NOTHING,
        Both({"stop": "e"}, fields={"stop": ["e"]}),
        Both(
            {"stop": ["a", "o", "1"], "include_stop_str_in_output": True},
            fields={"stop": ["a", "o", "1"], "include_stop": True},
        ),
    ),
    "stop_token_ids": (NOTHING, _same(stop_token_ids=[*range(260, 310)])),
    "min_tokens": (NOTHING, _same(min_tokens=5)),
    "n": (NOTHING, _same(n=2)),
    "logprob_token_ids": (NOTHING, _same(logprob_token_ids=[300, 9])),
    "prompt_logprobs": (NOTHING, Both({"prompt_logprobs": 2}, {"num_prompt_logprobs": 2})),
    "allowed_token_ids": (NOTHING, _same(allowed_token_ids=[*range(60, 100), 261, 300])),
    "form": (
        NOTHING,
        _form({"structured_outputs": {"regex": _REGEX}}, {"regex": _REGEX}),
        _form({"structured_outputs": {"choice": _CHOICES}}, {"choices": {"texts": _CHOICES}}),
        _form({"structured_outputs": {"grammar": _LARK}}, {"grammar": _LARK}),
        _form(
            {"structured_outputs": {"json": _SCHEMA, "disable_any_whitespace": True}},
            {"json_schema": json.dumps(_SCHEMA), "compact_json": True},
        ),
        _form({"response_format": {"type": "json_object"}}, {"json_object": True}),
        _form(
            {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": _SCHEMA}}},
            {"json_schema": json.dumps(_SCHEMA), "strict": False},
        ),
    ),
    "ignore_eos": (NOTHING, _same(ignore_eos=True)),
    "truncation": (NOTHING, Both({"truncate_prompt_tokens": 6}, fields={"truncate_prompt_tokens": 6})),
    "service": (
        NOTHING,
        Both(
            {"determinism": "exact", "priority": -3},
            fields={"determinism": common_pb2.DETERMINISM_EXACT, "priority": common_pb2.PRIORITY_HIGH},
        ),
        Both({"cache_salt": "mine", "priority": 9}, fields={"cache_salt": "mine", "priority": common_pb2.PRIORITY_LOW}),
        Both({"skip_special_tokens": False, "timeout_s": 3600}, fields={"skip_special_tokens": False}),
    ),
}


def _chat_of(*messages: tuple[str, str], **fields: Any) -> Both:
    return Both(
        {"messages": [{"role": role, "content": content} for role, content in messages], **fields},
        fields={"messages": [{"role": _ROLES[role], "content": content} for role, content in messages], **fields},
    )


def _with_tools(choice: Any, fields: dict[str, Any], **options: Any) -> Both:
    return Both({"tools": _OPENAI_TOOLS, "tool_choice": choice, **options}, fields={"tools": _TOOLS, **fields})


_ASKED, _TOLD = ("user", "Who was first?"), ("assistant", "It was")
_CALL = {"name": "look", "arguments": '{"a": "x"}'}

# Conversations, and what is said of tools; `fields` are those of the chat.
CHATS: dict[str, tuple[Both, ...]] = {
    "messages": (
        _chat_of(("user", "Say something.")),
        _chat_of(("developer", "Be brief."), ("user", "Привет 😀")),
        _chat_of(_ASKED, _TOLD, continue_final_message=True),
        _chat_of(_ASKED, _TOLD, _ASKED),
        Both(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": part} for part in ("one", "two")]}]},
            fields={"messages": [{"role": tokenizer_pb2.ROLE_USER, "content": "one\ntwo"}]},
        ),
        Both(
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": None,
                        "reasoning_content": "hm",
                        "tool_calls": [{"id": "call_1", "type": "function", "function": _CALL}],
                    },
                    {"role": "tool", "tool_call_id": "call_1", "content": "it rains"},
                ]
            },
            fields={
                "messages": [
                    {
                        "role": tokenizer_pb2.ROLE_ASSISTANT,
                        "reasoning": "hm",
                        "tool_calls": [{"id": "call_1", **_CALL}],
                    },
                    {"role": tokenizer_pb2.ROLE_TOOL, "content": "it rains", "tool_call_id": "call_1"},
                ]
            },
        ),
    ),
    "tools": (
        NOTHING,
        _with_tools("auto", {}),
        _with_tools("none", {"tool_mode": tokenizer_pb2.TOOL_MODE_NONE}),
        _with_tools("required", {"tool_mode": tokenizer_pb2.TOOL_MODE_REQUIRED}),
        _with_tools({"type": "function", "function": {"name": "find"}}, {"tool_name": "find"}),
        _with_tools(
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "find"}}]},
            },
            {"tool_mode": tokenizer_pb2.TOOL_MODE_REQUIRED, "allowed_tool_names": ["find"]},
        ),
        Both(
            {"tools": _ANTHROPIC_TOOLS, "tool_choice": {"type": "any"}, "parallel_tool_calls": False},
            fields={"tools": _TOOLS, "tool_mode": tokenizer_pb2.TOOL_MODE_REQUIRED, "single_tool_call": True},
        ),
    ),
    "template": (
        NOTHING,
        Both(
            {"reasoning_effort": "high"},
            fields={"template_variables": '{"enable_thinking": true, "thinking": true, "reasoning_effort": "high"}'},
        ),
        Both(
            {"chat_template_kwargs": {"style": "brief"}, "reasoning_effort": "none"},
            fields={"template_variables": '{"enable_thinking": false, "thinking": false, "style": "brief"}'},
        ),
    ),
}

_TEXTS = ("The quick brown fox", "Once upon a time there was a dog")
_IDS = ([1, 70, 300, 261, 9], [*range(40, 75)])
PROMPTS: tuple[Both, ...] = (
    Both({"prompt": _TEXTS[0]}, fields={"text": _TEXTS[0]}),
    Both({"prompt": _IDS[0]}, fields={"tokens": {"token_ids": _IDS[0]}}),
    Both({"prompt": [_TEXTS[1]]}, fields={"text": _TEXTS[1]}),
    Both({"prompt": list(_TEXTS)}, fields={"prompts": {"prompts": [{"text": text} for text in _TEXTS]}}),
    Both({"prompt": list(_IDS)}, fields={"prompts": {"prompts": [{"tokens": {"token_ids": ids}} for ids in _IDS]}}),
    Both(
        {"prompt": [_TEXTS[0], _IDS[1]]},
        fields={"prompts": {"prompts": [{"text": _TEXTS[0]}, {"tokens": {"token_ids": _IDS[1]}}]}},
    ),
)
ECHO = (NOTHING, Both({"echo": True}, fields={"echo": True}))
# These are asked for in different ways by chats and completions.
_NUM_LOGPROBS = (None, 0, 3)


def twin_requests(count: int, *, max_tokens: int, has_tools: bool) -> list[TwinRequest]:
    """Requests of every kind, at least `count`: any two options occur together in one of them, if both may.

    Args:
        count: Half of them are chats.
        max_tokens: Tokens of each choice; more where it must be a call.
        has_tools: Whether the model's template takes tools, and messages about them.
    """
    chats = CHATS if has_tools else {**CHATS, "tools": (NOTHING,), "messages": CHATS["messages"][:-1]}
    texts = {"prompt": PROMPTS, "echo": ECHO}
    rng = random.Random(4)
    return [_chat(row, max_tokens) for row in _rows(chats, count // 2, rng)] + [
        _completion(row, max_tokens) for row in _rows(texts, count - count // 2, rng)
    ]


def requests_without_limits() -> list[TwinRequest]:
    """A chat, which may then fill the context, and a completion, which then has 16 tokens."""
    text, chat = PROMPTS[0], CHATS["messages"][0]
    seeded = Both({"seed": 3, "ignore_eos": True}, {"seed": 3, "ignore_eos": True})
    return [
        _twin(CHAT, [chat, seeded], {"chat": chat.fields}),
        _twin(COMPLETION, [text, seeded, Both({}, {"max_tokens": 16})], text.fields),
    ]


def requests_for_the_prompt_alone() -> list[TwinRequest]:
    """Completions of no tokens, for the log-probabilities of their prompts."""
    return [
        _twin(
            COMPLETION,
            [
                prompt,
                Both(
                    {"max_tokens": 0, "echo": True, "logprobs": 2, "seed": 1},
                    {"max_tokens": 0, "num_logprobs": 2, "num_prompt_logprobs": 2, "seed": 1},
                ),
            ],
            {**prompt.fields, "echo": True},
        )
        for prompt in PROMPTS
    ]


def _rows(factors: dict[str, tuple[Both, ...]], count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Rows that have every pair of values, and random ones up to `count`."""
    every: dict[str, tuple[Any, ...]] = {**factors, **OPTIONS, "num_logprobs": _NUM_LOGPROBS}
    rows = pairwise_rows(every, seed=6)
    return rows + [{name: rng.choice(values) for name, values in every.items()} for _ in range(count - len(rows))]


def _chat(row: dict[str, Any], max_tokens: int) -> TwinRequest:
    chat = {name: value for part in CHATS for name, value in row[part].fields.items()}
    if "tool_name" in chat or chat.get("tool_mode") == tokenizer_pb2.TOOL_MODE_REQUIRED:
        # The calls are the form; a whole one takes about 40 tokens.
        row = {**row, "form": NOTHING, "ignore_eos": NOTHING}
        max_tokens *= _TOKENS_OF_CALLS
    options = [row[name] for name in (*CHATS, *OPTIONS)]
    num_top = row["num_logprobs"]
    if num_top is not None:
        options.append(Both({"logprobs": True, "top_logprobs": num_top}, {"num_logprobs": num_top}))
    options.append(Both({"max_completion_tokens": max_tokens}, {"max_tokens": max_tokens}))
    return _twin(CHAT, options, {"chat": chat, **_fields_of(row)})


def _completion(row: dict[str, Any], max_tokens: int) -> TwinRequest:
    num_top = row["num_logprobs"]
    begins_with_prompt = row["echo"] is not NOTHING and num_top is not None
    if begins_with_prompt:
        # A stream of several choices would repeat the prompt's log-probabilities, and is refused.
        row = {**row, "n": NOTHING, "prompt_logprobs": NOTHING}
    options = [row[name] for name in ("prompt", "echo", *OPTIONS)]
    if num_top is not None:
        options.append(Both({"logprobs": num_top}, {"num_logprobs": num_top}))
    if begins_with_prompt:
        options.append(Both({}, {"num_prompt_logprobs": num_top}))
    options.append(_same(max_tokens=max_tokens))
    return _twin(COMPLETION, options, {**row["prompt"].fields, **row["echo"].fields, **_fields_of(row)})


def _fields_of(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for option in OPTIONS for name, value in row[option].fields.items()}


def _twin(path: str, options: Sequence[Both], fields: dict[str, Any]) -> TwinRequest:
    body = {name: value for option in options for name, value in option.body.items()}
    sampling = {name: value for option in options for name, value in option.sampling.items()}
    if "structured_output" in fields:
        # A form ends the text with an end-of-sequence token.
        body.pop("ignore_eos", None)
        sampling.pop("ignore_eos", None)
    return TwinRequest(
        path, {**body, "return_token_ids": True}, tokenizer_pb2.GenerateRequest(**fields, sampling=sampling)
    )
