"""Request options beyond the prompt, and requests with several prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.request.checks import AnswerForm, CheckedRequest, check_request, resolve_request
from shared.errors import ContextExceededError, InvalidRequestError, RequestTooLargeError
from shared.request.limits import ModelLimits
from shared.request.sampling_params import SamplingOptions

LIMITS = ModelLimits(context_length=100, logits_width=50, num_pool_tokens=1000)
TEXT = tokenizer_pb2.Prompt(text="hello")
SCHEMA = tokenizer_pb2.StructuredOutput(json_schema="{}")
TOOL_CHAT = tokenizer_pb2.Chat(
    messages=[{"role": tokenizer_pb2.ROLE_USER, "content": "look"}],
    tools=[{"name": "look"}],
    tool_mode=tokenizer_pb2.TOOL_MODE_REQUIRED,
)


def make_request(
    *prompts: tokenizer_pb2.Prompt, sampling: dict[str, object] | None = None, **fields: object
) -> tokenizer_pb2.GenerateRequest:
    """A request for these prompts, or for a text if there are none."""
    prompt: dict[str, object] = {"prompts": tokenizer_pb2.PromptList(prompts=prompts)} if prompts else {"text": "hello"}
    if "chat" in fields:
        prompt = {}
    return tokenizer_pb2.GenerateRequest(
        **prompt,  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
        sampling=common_pb2.SamplingParams(**(sampling or {})),  # type: ignore[arg-type]
    )


def check(request: tokenizer_pb2.GenerateRequest, defaults: common_pb2.SamplingParams | None = None) -> CheckedRequest:
    return check_request(request, model_name="tiny", limits=LIMITS, defaults=defaults)


def refused_fields(request: tokenizer_pb2.GenerateRequest) -> dict[str, str]:
    """The violations of a request that must have some."""
    with pytest.raises(InvalidRequestError) as caught:
        check(request)
    return {violation.field: violation.reason for violation in caught.value.violations}


def test_the_form_of_the_answer_is_read() -> None:
    request = make_request(stop=["a"], include_stop=True, echo=True, skip_special_tokens=False, raw_text=True)
    assert check(request).form == AnswerForm(("a",), True, True, False, True)
    assert check(make_request(skip_special_tokens=True)).form == AnswerForm()


def test_several_prompts_are_read_in_order() -> None:
    tokens = tokenizer_pb2.Prompt(tokens={"token_ids": [1, 49]})
    checked = check(make_request(TEXT, tokens, request_id="r"))
    text, token_ids = checked.prompts
    assert text == "hello"
    assert isinstance(token_ids, np.ndarray)
    assert token_ids.tolist() == [1, 49]
    assert checked.prompt_ids == ["r-0", "r-1"]
    assert checked.all_ids == ["r", "r-0", "r-1"]


def test_a_single_prompt_in_a_list_uses_the_requests_id() -> None:
    checked = check(make_request(TEXT, request_id="r"))
    assert (checked.prompt_ids, checked.all_ids) == (["r"], ["r"])


def test_every_bad_prompt_is_named() -> None:
    prompts = [
        TEXT,
        tokenizer_pb2.Prompt(),
        tokenizer_pb2.Prompt(text=""),
        tokenizer_pb2.Prompt(tokens={"token_ids": [1, 50]}),
        tokenizer_pb2.Prompt(tokens={}),
        tokenizer_pb2.Prompt(chat={}),
    ]
    assert refused_fields(make_request(*prompts)) == {
        "prompts.prompts[1].prompt": "PROMPT_EMPTY",
        "prompts.prompts[2].text": "PROMPT_EMPTY",
        "prompts.prompts[3].tokens.token_ids[1]": "TOKEN_ID_OUT_OF_RANGE",
        "prompts.prompts[4].tokens.token_ids": "PROMPT_EMPTY",
        "prompts.prompts[5].chat.messages": "OUT_OF_RANGE",
    }


def test_no_prompts_and_too_many_are_refused() -> None:
    assert len(check(make_request(*[TEXT] * 64)).prompts) == 64
    assert refused_fields(make_request(*[TEXT] * 65)) == {"prompts.prompts": "OUT_OF_RANGE"}
    empty = tokenizer_pb2.GenerateRequest(prompts=tokenizer_pb2.PromptList())
    assert refused_fields(empty) == {"prompts.prompts": "OUT_OF_RANGE"}


def test_the_limit_of_text_applies_to_all_prompts_together() -> None:
    with pytest.raises(RequestTooLargeError):
        check(make_request(*[tokenizer_pb2.Prompt(text="x" * 2**20)] * 3, TEXT))


def test_an_id_leaves_room_for_the_numbers_of_its_prompts() -> None:
    assert check(make_request(TEXT, TEXT, request_id="x" * 61)).prompt_ids[1] == "x" * 61 + "-1"
    assert refused_fields(make_request(TEXT, TEXT, request_id="x" * 62)) == {"request_id": "OUT_OF_RANGE"}
    assert check(make_request(TEXT, request_id="x" * 64)).prompt_ids == ["x" * 64]


def test_each_prompt_is_resolved_by_itself() -> None:
    checked = check(make_request(TEXT, TEXT, request_id="r", sampling={"n": 3}))
    resolved = [
        resolve_request(checked, index, np.ones(size, np.int32), checked.sampling, LIMITS)
        for index, size in enumerate((10, 90))
    ]
    assert [(each.request_id, each.sampling.max_tokens, each.n) for each in resolved] == [
        ("r-0", 90, 3),
        ("r-1", 10, 3),
    ]
    assert resolved[0].sampling.seed == resolved[1].sampling.seed
    with pytest.raises(InvalidRequestError) as caught:
        resolve_request(checked, 1, np.empty(0, np.int32), checked.sampling, LIMITS)
    assert [violation.field for violation in caught.value.violations] == ["prompts.prompts[1].prompt"]


def test_absent_options_get_the_models_defaults() -> None:
    defaults = common_pb2.SamplingParams(temperature=0.5, max_tokens=1000, repetition_penalty=1.5)
    checked = check(make_request(), defaults)
    assert (checked.sampling.temperature, checked.sampling.options) == (0.5, SamplingOptions(repetition_penalty=1.5))
    assert resolve_request(checked, 0, np.ones(10, np.int32), checked.sampling, LIMITS).sampling.max_tokens == 90
    given = check(make_request(sampling={"max_tokens": 1000}), defaults)
    with pytest.raises(ContextExceededError):
        resolve_request(given, 0, np.ones(10, np.int32), given.sampling, LIMITS)


@pytest.mark.parametrize(
    ("words", "field"),
    [(["x"] * 33, "bad_words"), (["a", ""], "bad_words[1]"), ([" \n"], "bad_words[0]"), (["é" * 129], "bad_words[0]")],
)
def test_an_invalid_bad_word_is_named(words: list[str], field: str) -> None:
    assert refused_fields(make_request(bad_words=words)) == {field: "OUT_OF_RANGE"}


def test_bad_words_are_read() -> None:
    assert check(make_request(bad_words=["é" * 128, " two words"])).bad_words == ("é" * 128, " two words")


def test_constrained_text_cannot_ignore_eos() -> None:
    for fields in ({"structured_output": SCHEMA}, {"chat": TOOL_CHAT}):
        request = make_request(sampling={"ignore_eos": True}, **fields)
        assert refused_fields(request) == {"sampling.ignore_eos": "OUT_OF_RANGE"}
        request.sampling.ignore_eos = False
        assert check(request).n == 1


def test_a_form_is_not_that_of_an_answer_that_must_call_a_tool() -> None:
    request = make_request(chat=TOOL_CHAT, structured_output=SCHEMA)
    checked = check(request)
    assert checked.form_of(checked.prompts[0]) is None
    request.chat.tool_mode = tokenizer_pb2.TOOL_MODE_AUTO
    checked = check(request)
    assert checked.form_of(checked.prompts[0]) == SCHEMA


def test_bad_choices_and_options_are_named_with_the_rest() -> None:
    request = make_request(sampling={"n": 9, "min_p": 2.0}, bad_words=[""], stop=[""])
    assert refused_fields(request).keys() == {"sampling.n", "sampling.min_p", "bad_words[0]", "stop[0]"}


@pytest.mark.parametrize(("token_id", "fields"), [(49, []), (50, ["sampling.bad_words[0].token_ids[0]"])])
def test_bad_words_are_checked_once_they_are_tokens(token_id: int, fields: list[str]) -> None:
    checked = check(make_request(bad_words=["a"]))
    spelled = replace(checked.sampling, options=SamplingOptions(bad_words=((token_id,),)))
    refused: list[str] = []
    try:
        resolve_request(checked, 0, np.ones(3, np.int32), spelled, LIMITS)
    except InvalidRequestError as error:
        refused = [violation.field for violation in error.violations]
    assert refused == fields
