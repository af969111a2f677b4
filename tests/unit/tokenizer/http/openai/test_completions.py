"""Completions over real HTTP, with the scheduler played by the test."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from lockstep.v1 import common_pb2
from shared.request.sampling_codec import decode_options
from tests.support.models.tiny_tokenizer import CONTEXT_LENGTH
from tests.support.tokenizer.exchange_peer import Position, PromptRow, Row, make_end, read_column
from tests.support.tokenizer.http_client import MAX_TOKENS, HttpService

COMPLETIONS = "/v1/completions"
EOS = common_pb2.FINISH_REASON_EOS


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "The fox", **fields}


async def test_a_whole_answer_has_openais_form(http: HttpService, tokenizer: Tokenizer) -> None:
    task, [sent] = await http.begin(COMPLETIONS, completion(seed=5))
    # vLLM's default.
    assert sent.max_tokens == 16
    http.send(sent, tokenizer.encode(" jumps").ids)
    value = (await task).value
    assert (value["id"], value["object"]) == (f"cmpl-{sent.request_id}", "text_completion")
    assert value["choices"] == [
        {"index": 0, "text": " jumps", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert value["lockstep"]["seed"] == 5


async def test_the_default_of_max_tokens_is_cut_to_the_room(http: HttpService) -> None:
    task, [sent] = await http.begin(COMPLETIONS, completion(prompt=[70] * 190))
    assert sent.max_tokens == 10
    http.send(sent, [70])
    assert (await task).status == 200


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_prompts_of_any_kind_have_choices_in_order(http: HttpService, *, is_streamed: bool) -> None:
    body = completion(prompt=["a", [70, 71]], n=2, stream=is_streamed)
    task, submits = await http.begin(COMPLETIONS, body, num_prompts=2)
    assert read_column(submits[1].prompt_token_ids) == [70, 71]
    for sent in submits:
        for number in range(2):
            handle = sent.handle + number
            http.service.peer.send(Row(handle, 0, [72]), ends=[make_end(handle, MAX_TOKENS, 1)])
    answer = await task
    choices = [piece["choices"][0] for piece in answer.pieces] if is_streamed else answer.value["choices"]
    assert sorted(choice["index"] for choice in choices) == [0, 1, 2, 3]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_echo_has_the_prompts_log_probabilities(
    http: HttpService, tokenizer: Tokenizer, *, is_streamed: bool
) -> None:
    first, second, third, new = 70, 71, 72, 73
    body = completion(prompt=[first, second, third], echo=True, logprobs=1, max_tokens=1, stream=is_streamed)
    task, [sent] = await http.begin(COMPLETIONS, body)
    options = decode_options(sent.options)
    assert (options.num_logprobs, options.num_prompt_logprobs) == (1, 1)
    of_prompt = [Position(2, [(second, -1.5), (80, -0.5)]), Position(1, [(third, -0.25), (third, -0.25)])]
    http.service.peer.send(
        Row(sent.handle, 0, [new], logprobs=[Position(1, [(new, -0.125), (new, -0.125)])]),
        ends=[make_end(sent.handle, MAX_TOKENS, 1)],
        prompts=[PromptRow(sent.handle, 1, of_prompt)],
    )
    answer = await task
    texts = [tokenizer.decode([token_id]) for token_id in (first, second, third, new)]
    if is_streamed:
        choices = [piece["choices"][0] for piece in answer.pieces]
        text = "".join(choice["text"] for choice in choices)
        [logprobs] = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    else:
        [choice] = answer.value["choices"]
        text, logprobs = choice["text"], choice["logprobs"]
    assert text == "".join(texts)
    assert logprobs["tokens"] == texts
    assert logprobs["token_logprobs"] == [None, -1.5, -0.25, -0.125]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["top_logprobs"] == [
        None,
        {tokenizer.decode([80]): -0.5, texts[1]: -1.5},
        {texts[2]: -0.25},
        {texts[3]: -0.125},
    ]


async def test_max_tokens_0_with_echo_returns_the_prompt(http: HttpService) -> None:
    task, [sent] = await http.begin(COMPLETIONS, completion(echo=True, max_tokens=0))
    http.send(sent, [70])
    value = (await task).value
    assert (value["choices"][0]["text"], value["usage"]["completion_tokens"]) == ("The fox", 0)
    refused = await http.post(COMPLETIONS, completion(max_tokens=0))
    assert (refused.status, refused.error["param"]) == (400, "max_tokens")


async def test_vllms_extras_are_in_the_answer(http: HttpService) -> None:
    body = completion(
        prompt=[70, 71], return_token_ids=True, prompt_logprobs=0, logprobs=0, return_tokens_as_token_ids=True
    )
    task, [sent] = await http.begin(COMPLETIONS, body)
    http.service.peer.send(
        Row(sent.handle, 0, [72], logprobs=[Position(4, [(72, -2.0)])]),
        ends=[make_end(sent.handle, MAX_TOKENS, 1)],
        prompts=[PromptRow(sent.handle, 1, [Position(3, [(71, -1.0)])])],
    )
    [choice] = (await task).value["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([70, 71], [72])
    assert choice["logprobs"]["tokens"] == ["token_id:72"]
    [nothing, second] = choice["prompt_logprobs"]
    assert nothing is None
    assert second["71"] == {"logprob": -1.0, "rank": 3, "decoded_token": second["71"]["decoded_token"]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [9999]}, "prompt[0]"),
        ({"prompt": [9999], "echo": True, "logprobs": 1}, "prompt[0]"),
        ({"prompt": ["a", [70, 9999]]}, "prompt[1][1]"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 21, "echo": True}, "logprobs"),
        ({"n": 2, "stream": True, "echo": True, "logprobs": 1}, "n"),
    ],
)
async def test_a_bad_field_is_refused_by_name(http: HttpService, fields: dict[str, Any], param: str) -> None:
    answer = await http.post(COMPLETIONS, completion(**fields))
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_request", param)


async def test_a_truncated_prompt_is_told_as_it_was_kept(http: HttpService, tokenizer: Tokenizer) -> None:
    text = "The fox " * CONTEXT_LENGTH
    kept = tokenizer.encode(text).ids[-3:]
    body = completion(prompt=text, truncate_prompt_tokens=3, return_token_ids=True, max_tokens=1)
    task, [sent] = await http.begin(COMPLETIONS, body)
    assert read_column(sent.prompt_token_ids) == kept
    http.send(sent, [70])
    assert (await task).value["choices"][0]["prompt_token_ids"] == kept
