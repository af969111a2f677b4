"""Chats with OpenAI's library for Python."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Literal

import openai
from pydantic import BaseModel

from tests.clients.openai_python.asking import QUESTION, connect, error_of, say


class Weather(BaseModel):
    """What `.parse` makes of an answer."""

    city: Literal["Paris", "Rome"]
    sunny: bool
    degrees: Literal[10, 20]


def ask(cell: Any, **options: Any) -> Any:
    """Answer the question, greedily unless the options say otherwise."""
    return connect(cell).chat.completions.create(
        **{"model": cell.model, "messages": say(QUESTION), "temperature": 0, "max_completion_tokens": 24, **options}
    )


def check_chat(cell: Any) -> None:
    """A chat is answered by the model that was asked, with its usage."""
    answer = ask(cell)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert (answer.object, answer.model) == ("chat.completion", cell.model)
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint.startswith("fp_")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id == answer.id.removeprefix("chatcmpl-")


def check_other_name(cell: Any) -> None:
    """A client may send a name of its own, and is answered by the first one."""
    assert ask(cell, model=cell.other_name, max_completion_tokens=1).model == cell.model


def check_request_id(cell: Any) -> None:
    """The client's own id is echoed, and is not the answer's."""
    answer = ask(cell, max_completion_tokens=1, extra_headers={"X-Request-Id": "mine"})
    assert answer._request_id == "mine"
    assert "mine" not in answer.id


def check_stream(cell: Any) -> None:
    """A stream has the role first, the finish once, the usage last, and the text of the whole answer."""
    whole = ask(cell)
    pieces = list(ask(cell, stream=True, stream_options={"include_usage": True}))
    assert {(piece.id, piece.created, piece.model, piece.object) for piece in pieces} == {
        (pieces[0].id, pieces[0].created, cell.model, "chat.completion.chunk")
    }
    *texts, last = pieces
    assert (texts[0].choices[0].delta.role, texts[0].choices[0].delta.content) == ("assistant", "")
    assert [piece.choices[0].delta.role for piece in texts[1:]] == [None] * (len(texts) - 1)
    finishes = [piece.choices[0].finish_reason for piece in texts]
    assert finishes == [None] * (len(texts) - 1) + ["stop"]
    assert "".join(piece.choices[0].delta.content or "" for piece in texts) == whole.choices[0].message.content
    assert [piece.usage for piece in texts] == [None] * len(texts)
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.system_fingerprint == whole.system_fingerprint


def check_stream_helper(cell: Any) -> None:
    """The library's own helper assembles the whole answer from a stream."""
    whole = ask(cell, logprobs=True)
    options = {"temperature": 0, "max_completion_tokens": 24, "logprobs": True}
    with connect(cell).chat.completions.stream(model=cell.model, messages=say(QUESTION), **options) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"
    tokens = [entry.token for entry in final.choices[0].logprobs.content]
    assert tokens == [entry.token for entry in whole.choices[0].logprobs.content]
    done = [event.content for event in events if event.type == "content.done"]
    assert done == [whole.choices[0].message.content]


async def check_async_client(cell: Any) -> None:
    """The asynchronous client gets the same."""
    whole = ask(cell)
    async with openai.AsyncOpenAI(base_url=cell.base_url, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=cell.model, messages=say(QUESTION), temperature=0, max_completion_tokens=24, stream=True
        )
        text = "".join([piece.choices[0].delta.content or "" async for piece in stream])
    assert text == whole.choices[0].message.content


def check_length(cell: Any) -> None:
    """An answer ends at the most tokens, by either name of the field."""
    for name in ("max_tokens", "max_completion_tokens"):
        answer = ask(cell, **{"max_completion_tokens": None, name: 3})
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 3)


def check_choices(cell: Any) -> None:
    """Several choices of one seed are the same again, whole and streamed, and differ from each other."""
    options = {"n": 3, "temperature": 1, "seed": 7, "max_completion_tokens": 8}
    whole = ask(cell, **options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1
    streamed, finished = ["", "", ""], []
    for piece in ask(cell, **options, stream=True):
        for choice in piece.choices:
            streamed[choice.index] += choice.delta.content or ""
            finished += [choice.index] if choice.finish_reason else []
    assert streamed == texts
    assert sorted(finished) == [0, 1, 2]


def check_drawn_seed(cell: Any) -> None:
    """The seed that an answer tells, given back, brings the answer again."""
    first = ask(cell, temperature=1, max_completion_tokens=8)
    again = ask(cell, temperature=1, max_completion_tokens=8, seed=first.lockstep["seed"])
    assert again.choices[0].message.content == first.choices[0].message.content


def check_any_seed(cell: Any) -> None:
    """Any integer is a seed, but -1, which asks for one by chance."""
    ask(cell, temperature=1, max_completion_tokens=1, seed=-1)
    for seed in (-2, 2**70):
        texts = {
            ask(cell, temperature=1, max_completion_tokens=6, seed=seed).choices[0].message.content for _ in range(2)
        }
        assert len(texts) == 1


def check_stop(cell: Any) -> None:
    """A stop string ends the text before it, whole and streamed."""
    whole = ask(cell).choices[0].message.content
    for stop in (" Paris", ["nothing", " Paris"]):
        answer = ask(cell, stop=stop)
        assert answer.choices[0].message.content == whole.partition(" Paris")[0]
        assert answer.choices[0].finish_reason == "stop"
    pieces = ask(cell, stop=" Paris", stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.partition(" Paris")[0]


def check_logprobs(cell: Any) -> None:
    """Each token has its log-probability, its bytes, and the likeliest ones in order."""
    answer = ask(cell, logprobs=True, top_logprobs=3)
    [choice] = answer.choices
    entries = choice.logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    content = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert content.removesuffix("<|im_end|>") == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        likeliest = [top.logprob for top in entry.top_logprobs]
        assert likeliest == sorted(likeliest, reverse=True)
        # Greedy.
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, likeliest[0])
        assert entry.logprob <= 0
    assert ask(cell, logprobs=True, max_completion_tokens=1).choices[0].logprobs.content[0].top_logprobs == []


def check_bytes_of_half_characters(cell: Any) -> None:
    """A token that is a part of a character has its own bytes, which add up to the character."""
    answer = ask(
        cell,
        logprobs=True,
        top_logprobs=2,
        extra_body={"structured_outputs": {"choice": ["\N{FERRIS WHEEL}\N{SNOWMAN}"]}},
    )
    entries = answer.choices[0].logprobs.content
    content = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert content.removesuffix("<|im_end|>") == answer.choices[0].message.content == "\N{FERRIS WHEEL}\N{SNOWMAN}"
    assert any("\N{REPLACEMENT CHARACTER}" in entry.token for entry in entries)


def check_parse(cell: Any) -> None:
    """An answer in the form of a pydantic model is parsed into it, whole and streamed."""
    completions = connect(cell).chat.completions
    options = {"model": cell.model, "messages": say("The weather?"), "temperature": 0, "response_format": Weather}
    parsed = completions.parse(**options).choices[0].message.parsed
    assert isinstance(parsed, Weather)
    with completions.stream(**options) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def check_parse_of_a_cut_answer(cell: Any) -> None:
    """An answer that is cut off raises the library's error."""
    parse = partial(connect(cell).chat.completions.parse, model=cell.model, messages=say("The weather?"))
    cut = partial(parse, response_format=Weather, max_completion_tokens=2)
    assert error_of(openai.LengthFinishReasonError, cut).completion.usage.completion_tokens == 2


def check_json_object(cell: Any) -> None:
    """`json_object` gives a JSON object."""
    answer = ask(cell, messages=say("Give me a JSON object with a city"), response_format={"type": "json_object"})
    assert answer.choices[0].message.content.startswith("{")
    compact = {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}
    answer = ask(cell, messages=say('Answer with {"a": 1}'), extra_body=compact)
    assert json.loads(answer.choices[0].message.content) == {"a": 1}


def check_logit_bias(cell: Any) -> None:
    """A banned token does not come, a favoured one always."""
    client = connect(cell)
    body = {"model": cell.model, "prompt": " Rome"}
    tokens = client.post(f"{cell.url}/tokenize", cast_to=dict[str, Any], body=body)["tokens"]
    assert len(tokens) == 1
    answer = ask(cell, logit_bias={str(tokens[0]): 100}, max_completion_tokens=3)
    assert answer.choices[0].message.content == " Rome Rome Rome"


def check_roles(cell: Any) -> None:
    """A developer's message is a system's, and parts of text are a text."""
    system = [{"role": "system", "content": "Be brief."}, *say(QUESTION)]
    developer = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *say(QUESTION)]
    one, other = (ask(cell, messages=messages, max_completion_tokens=6) for messages in (system, developer))
    assert one.choices[0].message.content == other.choices[0].message.content
    assert one.usage.prompt_tokens == other.usage.prompt_tokens


def check_ignored_fields(cell: Any) -> None:
    """Fields without effect are named in a header."""
    raw = connect(cell).chat.completions.with_raw_response.create(
        model=cell.model,
        messages=say(QUESTION),
        max_completion_tokens=1,
        store=True,
        metadata={"a": "b"},
        user="me",
        service_tier="auto",
        prompt_cache_key="key",
    )
    assert set(raw.headers["x-lockstep-ignored"].split(", ")) == {
        "store",
        "metadata",
        "user",
        "service_tier",
        "prompt_cache_key",
    }
    assert raw.parse().choices[0].finish_reason == "length"


def check_penalties_and_effort(cell: Any) -> None:
    """The other fields that the library knows are taken."""
    answer = ask(
        cell,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        top_p=0.9,
        reasoning_effort="none",
        verbosity="medium",
        modalities=["text"],
        max_completion_tokens=4,
    )
    assert answer.usage.completion_tokens == 4
