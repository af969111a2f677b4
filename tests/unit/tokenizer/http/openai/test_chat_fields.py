"""What each field of a chat means to the cell, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.http.openai.chat_request import read_chat_request
from shared.request.sampling_codec import decode_options
from tests.support.tokenizer.exchange_peer import Position, Row, make_end
from tests.support.tokenizer.http_client import MAX_TOKENS, MESSAGES, HttpService, run_http_service

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}, "strict": True}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, **fields}


def read(**fields: Any) -> tokenizer_pb2.GenerateRequest:
    return read_chat_request(chat(**fields), "r").message


def test_sampling_fields_go_to_the_message() -> None:
    sampling = read(
        temperature=0.5, top_p=0.25, top_k=-1, min_p=0.125, n=2, seed=-2, stop_token_ids=[3], logit_bias={"5": -2},
        frequency_penalty=1, presence_penalty=-1, repetition_penalty=1.5, min_tokens=2, max_tokens=4, ignore_eos=True,
        allowed_token_ids=[5, 6], logprob_token_ids=[7], logprobs=True, top_logprobs=3, prompt_logprobs=1,
    ).sampling  # fmt: skip
    assert sampling == common_pb2.SamplingParams(
        temperature=0.5, top_p=0.25, top_k=0, min_p=0.125, n=2, seed=2**64 - 2, stop_token_ids=[3],
        logit_bias={5: -2}, frequency_penalty=1, presence_penalty=-1, repetition_penalty=1.5, min_tokens=2,
        max_tokens=4, ignore_eos=True, allowed_token_ids=[5, 6], logprob_token_ids=[7], num_logprobs=3,
        num_prompt_logprobs=1,
    )  # fmt: skip
    unset = {field.name for field in sampling.DESCRIPTOR.fields} - {field.name for field, _ in sampling.ListFields()}
    # The API takes them as texts, in the request.
    assert unset == {"bad_words", "stop_token_sequences"}


def test_other_fields_go_to_the_message() -> None:
    message = read(
        stop="x", priority=-5, cache_salt="s", bad_words=["w"], include_stop_str_in_output=True,
        skip_special_tokens=False, truncate_prompt_tokens=3, determinism="exact",
    )  # fmt: skip
    assert (list(message.stop), message.cache_salt, list(message.bad_words)) == (["x"], "s", ["w"])
    assert message.priority == common_pb2.PRIORITY_HIGH
    assert message.determinism == common_pb2.DETERMINISM_EXACT
    assert (message.include_stop, message.skip_special_tokens, message.truncate_prompt_tokens) == (True, False, 3)
    assert read(priority=0).priority == common_pb2.PRIORITY_NORMAL
    assert read(priority=9).priority == common_pb2.PRIORITY_LOW


ANTHROPIC_CALL = {"type": "tool_use", "id": "c", "name": "find", "input": {"a": 1}}
ANTHROPIC_RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "found"}]}


def test_calls_and_results_may_be_parts_of_messages() -> None:
    roles = tokenizer_pb2.Role
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "why", "signature": "s"}, ANTHROPIC_CALL]},
        {"role": "user", "content": [ANTHROPIC_RESULT, {"type": "text", "text": "and?"}]},
        {"role": "user", "content": [ANTHROPIC_RESULT | {"content": "again"}]},
    ]
    call = {"id": "c", "name": "find", "arguments": '{"a": 1}'}
    expected = tokenizer_pb2.Chat(
        messages=[
            {"role": roles.ROLE_USER, "content": "hi"},
            {"role": roles.ROLE_ASSISTANT, "tool_calls": [call], "reasoning": "why"},
            {"role": roles.ROLE_TOOL, "tool_call_id": "c", "content": "found"},
            {"role": roles.ROLE_USER, "content": "and?"},
            {"role": roles.ROLE_TOOL, "tool_call_id": "c", "content": "again"},
        ]
    )
    assert read(messages=messages).chat.messages == expected.messages


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [ANTHROPIC_CALL]}, "messages[1].tool_calls"),
        ({"role": "assistant", "content": [ANTHROPIC_CALL | {"name": None}]}, "messages[1].content[0].name"),
        (
            {"role": "user", "content": [ANTHROPIC_RESULT | {"content": [{"type": "hologram"}]}]},
            "messages[1].content[0].content[0]",
        ),
        ({"role": "user", "content": [ANTHROPIC_CALL | {"input": "no object"}]}, "messages[1].content[0].input"),
    ],
)
async def test_a_wrong_part_of_a_message_is_named(http: HttpService, message: dict[str, Any], param: str) -> None:
    # The results become messages of their own, before the one that is wrong.
    first = {"role": "user", "content": [ANTHROPIC_RESULT, ANTHROPIC_RESULT, {"type": "text", "text": "a"}]}
    for path in (CHAT, "/tokenize"):
        answer = await http.post(path, chat(messages=[first, message]))
        assert (answer.status, answer.error["param"]) == (400, param)


def test_null_means_absent() -> None:
    fields = ("temperature", "stop", "tools", "tool_choice", "response_format", "logit_bias", "stream_options", "n")
    assert read(seed=1, **dict.fromkeys(fields)) == read(seed=1)


def test_one_call_may_be_asked_for_in_two_ways() -> None:
    assert read(tools=[TOOL], parallel_tool_calls=False).chat.single_tool_call
    assert read(tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True}).chat.single_tool_call
    assert not read(tools=[TOOL], tool_choice="auto").chat.single_tool_call


def test_messages_of_every_role() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "why"},
        {"role": "tool", "tool_call_id": "c", "content": "found"},
    ]
    roles = tokenizer_pb2.Role
    expected = tokenizer_pb2.Chat(
        messages=[
            {"role": roles.ROLE_SYSTEM, "content": "d"},
            {"role": roles.ROLE_USER, "content": "a\nb", "name": "me"},
            {
                "role": roles.ROLE_ASSISTANT,
                "tool_calls": [{"id": "c", "name": "find", "arguments": '{"a": 1}'}],
                "reasoning": "why",
            },
            {"role": roles.ROLE_TOOL, "tool_call_id": "c", "content": "found"},
        ]
    )
    assert read(messages=messages).chat.messages == expected.messages


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", {"tool_mode": tokenizer_pb2.TOOL_MODE_NONE}),
        ("auto", {"tool_mode": tokenizer_pb2.TOOL_MODE_AUTO}),
        ("required", {"tool_mode": tokenizer_pb2.TOOL_MODE_REQUIRED}),
        ({"type": "any"}, {"tool_mode": tokenizer_pb2.TOOL_MODE_REQUIRED}),
        ({"type": "function", "function": {"name": "find"}}, {"tool_name": "find"}),
        ({"type": "tool", "name": "find"}, {"tool_name": "find"}),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}},
            {"tool_mode": tokenizer_pb2.TOOL_MODE_REQUIRED, "allowed_tool_names": ["find"]},
        ),
    ],
)
def test_every_tool_choice(choice: Any, expected: dict[str, Any]) -> None:
    found = read(tools=[TOOL], tool_choice=choice).chat
    assert found == tokenizer_pb2.Chat(
        messages=found.messages, tools=found.tools, keep_invalid_arguments=True, **expected
    )


def test_anthropics_tools_are_understood() -> None:
    tool = {"name": "find", "description": "d", "input_schema": {"type": "object"}}
    [found] = read(tools=[tool], parallel_tool_calls=False).chat.tools
    assert found == tokenizer_pb2.Tool(name="find", description="d", parameters='{"type": "object"}')


@pytest.mark.parametrize(
    ("effort", "variables"),
    [
        ("none", {"enable_thinking": False, "thinking": False}),
        ("high", {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
    ],
)
def test_the_reasoning_effort_is_the_templates(effort: str, variables: dict[str, Any]) -> None:
    assert json.loads(read(reasoning_effort=effort).chat.template_variables) == variables


def test_forms() -> None:
    schema = {"type": "object"}
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    form = read(response_format=named).structured_output
    assert (form.json_schema, form.HasField("strict"), form.strict) == ('{"type": "object"}', True, False)
    strict = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert read(response_format=strict).structured_output.strict
    assert read(response_format={"type": "json_object"}).structured_output.json_object
    assert not read(response_format={"type": "text"}).HasField("structured_output")
    assert read(structured_outputs={"choice": ["a"]}).structured_output.choices.texts == ["a"]
    compact = read(structured_outputs={"json": schema, "disable_any_whitespace": True}).structured_output
    assert (compact.compact_json, compact.HasField("strict")) == (True, False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "nobody", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "tool", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages[0].tool_calls"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"top_k": -2}, "top_k"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"n": 9}, "n"),
        ({"stop": [""]}, "stop[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        # The template takes none.
        ({"tools": [TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"functions": [{}]}, "functions"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template": "x"}, "chat_template"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"cache_salt": "x" * 65}, "cache_salt"),
    ],
)  # fmt: skip
async def test_a_bad_field_is_refused_by_name(http: HttpService, fields: dict[str, Any], param: str) -> None:
    answer = await http.post(CHAT, chat(**fields))
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_request", param)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("image_url", "an image"),
        ("image", "an image"),
        ("input_image", "an image"),
        ("input_audio", "sound"),
        ("audio_url", "sound"),
        ("video_url", "a video"),
        ("video", "a video"),
        ("file", "a file"),
        ("input_file", "a file"),
        ("document", "a document"),
        ("hologram", "of an unknown type"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_a_part_that_is_not_text_is_refused_by_its_kind_and_place(
    http: HttpService, path: str, kind: str, name: str
) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:a"}}]
    answer = await http.post(path, {"messages": [{"role": "user", "content": parts}]})
    place = "messages[0].content[1]"
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, place, "invalid_request")
    assert answer.error["message"] == f"{place}: is {name}, but only text can be read"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"\xff", "not UTF-8"),
        (b'{"n": NaN}', "NaN"),
        (b'{"n": 1, "n": 1}', "two values of one name"),
        (b'{"n": "\\ud800"}', "lone surrogate"),
        (b'{"n":' + b"[" * 70 + b"]" * 70 + b"}", "nested too deep"),
        (b"[" * 200_000, "nested too deep"),
    ],
)
async def test_a_body_that_is_no_json_object_is_refused(http: HttpService, body: bytes, words: str) -> None:
    answer = await http.ask("POST", CHAT, data=body, headers={"Content-Type": "application/json"})
    assert (answer.status, answer.error["param"]) == (400, None)
    assert words in answer.error["message"]


async def test_what_has_no_effect_is_named(tools_model_dir: Path, tmp_path: Path) -> None:
    async with run_http_service(tools_model_dir, tmp_path) as http:
        schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        body = chat(store=True, metadata={"a": "b"}, user=None, response_format=form)
        task, [sent] = await http.begin(CHAT, body)
        http.send(sent, [70])
        answer = await task
        assert answer.headers["x-lockstep-ignored"] == (
            "store, metadata, response_format.json_schema.schema#/properties/a/uniqueItems"
        )
        task, [sent] = await http.begin(CHAT, chat(tools=[TOOL], stream=True))
        http.send(sent, [70])
        assert (await task).headers["x-lockstep-ignored"] == "tools[0].function.strict"


def test_what_has_no_effect_is_named_inside_of_other_fields() -> None:
    api = read_chat_request(
        chat(
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a", "cache_control": {}, "detail": 1}],
                    "weight": 1,
                }
            ],
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"x": 1}, "returns": {}}, "y": None}],
            response_format={"type": "json_schema", "json_schema": {"schema": {"z": 1}}},
            stream=True,
            stream_options={"include_obfuscation": False},
            chat_template_kwargs={"anything": 1},
        ),
        "r",
    )
    assert api.ignored == [
        "messages[0].content[0].detail",
        "messages[0].weight",
        "tools[0].function.returns",
        "stream_options.include_obfuscation",
    ]


async def test_log_probabilities_have_true_bytes(http: HttpService, tokenizer: Tokenizer) -> None:
    half, other = tokenizer.encode("é").ids[0], 70
    task, [sent] = await http.begin(CHAT, chat(logprobs=True, top_logprobs=1, logprob_token_ids=[other]))
    assert decode_options(sent.options).logprob_token_ids == (other,)
    http.service.peer.send(
        Row(
            sent.handle,
            0,
            [half],
            logprobs=[Position(1, [(half, -0.5), (other, float("-inf")), (half, -0.5)], requested_ranks=[9])],
        ),
        ends=[make_end(sent.handle, MAX_TOKENS, 1)],
    )
    [choice] = (await task).value["choices"]
    [entry] = choice["logprobs"]["content"]
    assert (entry["logprob"], bytes(entry["bytes"])) == (-0.5, tokenizer_bytes(tokenizer, half))
    assert [token["logprob"] for token in entry["top_logprobs"]] == [-0.5, -9999.0]


def tokenizer_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    text = tokenizer.decode([token_id])
    return "é".encode()[:1] if "\ufffd" in text else text.encode()
