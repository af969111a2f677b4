"""Completions with OpenAI's library for Python."""

from __future__ import annotations

from typing import Any

from tests.clients.openai_python.asking import connect

PROMPT = "The capital of France is"


def complete(cell: Any, **options: Any) -> Any:
    """Continue the prompt, greedily unless the options say otherwise."""
    return connect(cell).completions.create(
        **{"model": cell.model, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, **options}
    )


def token_ids(cell: Any, text: str) -> list[int]:
    """The text's tokens."""
    found = connect(cell).post(f"{cell.url}/tokenize", cast_to=dict[str, Any], body={"prompt": text})
    ids: list[int] = found["tokens"]
    return ids


def check_completion(cell: Any) -> None:
    """A text is continued."""
    answer = complete(cell)
    assert "Paris" in answer.choices[0].text
    assert (answer.object, answer.model) == ("text_completion", cell.model)
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8


def check_default_length(cell: Any) -> None:
    """Without max_tokens there are 16."""
    answer = connect(cell).completions.create(model=cell.model, prompt=PROMPT, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def check_stream(cell: Any) -> None:
    """A stream has the text of the whole answer, the finish once and the usage last."""
    whole = complete(cell)
    *pieces, last = complete(cell, stream=True, stream_options={"include_usage": True})
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert (last.choices, last.usage.completion_tokens) == ([], 8)


def check_prompts(cell: Any) -> None:
    """Texts, token ids, and lists of either are continued in order, each by itself."""
    ids, other = token_ids(cell, PROMPT), "Once upon a"
    first = complete(cell).choices[0].text
    second = complete(cell, prompt=other).choices[0].text
    for prompt in (ids, [PROMPT], [ids]):
        assert [choice.text for choice in complete(cell, prompt=prompt).choices] == [first]
    for prompts in ([PROMPT, other], [ids, token_ids(cell, other)]):
        answer = complete(cell, prompt=prompts)
        assert [(choice.index, choice.text) for choice in answer.choices] == [(0, first), (1, second)]
        assert answer.usage.completion_tokens == 16
    twice = complete(cell, prompt=[PROMPT, other], n=2)
    assert [choice.text for choice in twice.choices] == [first, first, second, second]
    streamed = ["", ""]
    for piece in complete(cell, prompt=[PROMPT, other], stream=True):
        for choice in piece.choices:
            streamed[choice.index] += choice.text
    assert streamed == [first, second]


def check_echo(cell: Any) -> None:
    """The prompt comes before its continuation, whole and streamed."""
    text = PROMPT + complete(cell).choices[0].text
    assert complete(cell, echo=True).choices[0].text == text
    pieces = complete(cell, echo=True, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == text


def check_logprobs(cell: Any) -> None:
    """Each token has its log-probability, the likeliest ones, and where it begins."""
    choice = complete(cell, logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 8
    starts = [len("".join(logprobs.tokens[:index])) for index in range(8)]
    assert logprobs.text_offset == starts
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == value == max(top.values())
    streamed = [piece.choices[0].logprobs for piece in complete(cell, logprobs=2, stream=True)]
    assert [token for piece in streamed if piece for token in piece.tokens] == logprobs.tokens
    assert [offset for piece in streamed if piece for offset in piece.text_offset] == starts


def check_log_likelihood(cell: Any) -> None:
    """A text is scored without a token being generated, and so are its last tokens of a longer one."""
    for options in ({"max_tokens": 0}, {"max_tokens": 1}):
        answer = complete(cell, echo=True, logprobs=1, **options)
        logprobs = answer.choices[0].logprobs
        num_tokens = len(token_ids(cell, PROMPT)) + options["max_tokens"]
        assert len(logprobs.tokens) == num_tokens
        assert "".join(logprobs.tokens) == answer.choices[0].text
        assert answer.choices[0].text.startswith(PROMPT)
        assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
        assert all(value < 0 for value in logprobs.token_logprobs[1:])
        assert answer.usage.completion_tokens == options["max_tokens"]
    many = complete(cell, prompt=[PROMPT, PROMPT], echo=True, logprobs=1, max_tokens=0)
    assert [choice.text for choice in many.choices] == [PROMPT, PROMPT]


def check_stop(cell: Any) -> None:
    """A stop string ends the text before it."""
    answer = complete(cell, stop="aris")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" P", "stop")
