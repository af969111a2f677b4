"""A form applies to the answer: reasoning before it is free, and the text is the form exactly.

The grammar that reaches the cell is followed as a worker follows it, and what it lets the model write is the reply.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.replies import REPLY_PARSERS
from services.worker.runner.matchers import GrammarMatchers
from services.worker.sampling.sampling_state import SamplingState
from shared.model_files.model_dir import CONFIG, GENERATION_CONFIG, TOKENIZER
from shared.request.sampling_codec import decode_options
from shared.request.sampling_params import SamplingOptions
from tests.support.clients.client import Completion, read_answer
from tests.support.models.tiny_tokenizer import (
    CONTEXT_LENGTH,
    IM_END_ID,
    TOOLS_CHATML,
    tiny_tokenizer,
    write_tiny_tokenizer,
)
from tests.support.tokenizer.exchange_peer import Row, make_end
from tests.support.tokenizer.tokenizer_service import Service, run_tokenizer_service
from tests.support.worker.worker_steps import column

WIDTH = 512
FORM = r"\n?[a-c]{2,6}\n?"
HELLO = [{"role": tokenizer_pb2.ROLE_USER, "content": "hi"}]
TOOLS = [{"name": "look", "parameters": '{"type": "object", "properties": {"a": {"type": "integer"}}}'}]

# By parser: what the template adds to the prompt so that reasoning is open, and the token that closes it.
REASONERS = {
    "hermes": ("<think>\n", "</think>"),
    "generic": ("<think>\n", "</think>"),
    "deepseek_v3": ("<think>", "</think>"),
    "glm4": ("<think>", "</think>"),
    "harmony": ("", "<|end|>"),
}


@pytest.fixture(scope="module")
def reasoners(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Model directories by parser and by what the prompt ends with."""
    directories = {}
    for name, (opening, _) in REASONERS.items():
        for end in dict.fromkeys((opening, "", "<think>\n\n</think>\n\n")):
            directory = tmp_path_factory.mktemp(name)
            # A template that knows the markup, in a place that it does not reach.
            template = f"{TOOLS_CHATML}{end}{{% if false %}}<think>{{% endif %}}"
            write_tiny_tokenizer(directory, chat_template=template)
            tokenizer = tiny_tokenizer()
            markup = sorted(REPLY_PARSERS[name].markup)
            tokenizer.add_tokens([AddedToken(text, special="|" in text, normalized=False) for text in markup])
            tokenizer.save(str(directory / TOKENIZER))
            config = {"model_type": "llama", "vocab_size": WIDTH, "max_position_embeddings": CONTEXT_LENGTH}
            (directory / CONFIG).write_text(json.dumps(config))
            (directory / GENERATION_CONFIG).write_text(json.dumps({"eos_token_id": IM_END_ID}))
            directories[name, end] = directory
    return directories


@asynccontextmanager
async def serving(model_dir: Path, tmp_path: Path, name: str) -> AsyncIterator[Service]:
    async with run_tokenizer_service(model_dir, tmp_path, reply_parser=name, logits_width=WIDTH) as service:
        await service.link()
        yield service


@cache
def matchers_of(model_dir: Path) -> GrammarMatchers:
    return GrammarMatchers(model_dir, WIDTH, (IM_END_ID,))


class Model:
    """Writes what a grammar allows: some random tokens of reasoning, then what ends the answer soon."""

    def __init__(self, model_dir: Path, name: str, seed: int) -> None:
        self._matchers = matchers_of(model_dir)
        self._tokenizer = Tokenizer.from_file(str(model_dir / TOKENIZER))
        self._random = np.random.default_rng(seed)
        self._close: int = self._tokenizer.encode(REASONERS[name][1]).ids[0]
        self.tells: list[bool] = []
        """For each token, whether any other but the end of sequence could have come."""

    def write(self, options: SamplingOptions, wanted: str = "") -> list[int]:
        """A reply; where it may, it begins with `wanted`."""
        state = SamplingState(
            options,
            stop_token_ids=column([]),
            num_prompt_tokens=1,
            logits_width=WIDTH,
            matcher=self._matchers.make(options.grammar),
            eos_token_ids=(IM_END_ID,),
        )
        state.extend(column([0]))
        begin = iter(self._tokenizer.encode(wanted).ids)
        token_ids: list[int] = []
        num_free = int(self._random.integers(1, 12))
        while len(token_ids) < 120:
            self.tells.append(state.is_free)
            allowed = np.flatnonzero(state.process(np.zeros(WIDTH, np.float32), 1) > -np.inf)
            token_id = next(begin, -1)
            if token_id in allowed:
                pass
            elif state.is_free:
                num_free -= 1
                token_id = self._close if num_free < 0 else int(self._random.integers(20, 300))
            elif IM_END_ID in allowed and self._random.random() < 0.5:
                token_id = IM_END_ID
            else:
                token_id = int(self._random.choice(allowed))
            token_ids.append(token_id)
            if token_id == IM_END_ID:
                break
            state.append(token_id)
        return token_ids


async def submit(service: Service, request: tokenizer_pb2.GenerateRequest) -> tuple[Any, exchange_pb2.Submit]:
    """Start a request; returns the call and what the cell got of it."""
    call = service.stub.Generate(request)
    sent = asyncio.create_task(service.peer.submits.get())
    await asyncio.wait([sent, asyncio.create_task(call.code())], return_when=asyncio.FIRST_COMPLETED)
    assert sent.done(), await call.details()
    return call, sent.result()


async def reply(
    service: Service, model: Model, request: tokenizer_pb2.GenerateRequest, wanted: str = ""
) -> tuple[Completion, SamplingOptions]:
    """The choice that the model writes under the request's grammar."""
    call, sent = await submit(service, request)
    options = decode_options(sent.options)
    token_ids = model.write(options, wanted)
    assert token_ids[-1] == IM_END_ID
    end = make_end(sent.handle, common_pb2.FINISH_REASON_EOS, len(token_ids), stop_token_id=IM_END_ID)
    service.peer.send(Row(sent.handle, 0, token_ids), ends=[end])
    [choice] = (await read_answer(call)).choices.values()
    return choice, options


def chat_request(**fields: Any) -> tokenizer_pb2.GenerateRequest:
    chat = tokenizer_pb2.Chat(messages=HELLO, tools=fields.pop("tools", ()))
    form = fields.pop("form", {"regex": FORM})
    return tokenizer_pb2.GenerateRequest(chat=chat, structured_output=form, **fields)


def openings() -> Iterator[Any]:
    for name, (opening, _) in REASONERS.items():
        yield pytest.param(name, opening, id=f"{name}-{'opened' if opening else 'either'}")
        if opening:
            yield pytest.param(name, "", id=f"{name}-either")


@pytest.mark.parametrize(("name", "end"), list(openings()))
async def test_the_text_is_the_form_after_free_reasoning(
    reasoners: dict[tuple[str, str], Path], tmp_path: Path, name: str, end: str
) -> None:
    model_dir = reasoners[name, end]
    opens = {"harmony": "<|channel|>analysis<|message|>"}.get(name, "" if end else "<think>")
    reasons = []
    async with serving(model_dir, tmp_path, name) as service:
        for seed in range(4):
            model = Model(model_dir, name, seed)
            choice, options = await reply(service, model, chat_request(), opens)
            assert re.fullmatch(FORM, choice.text), choice.text
            assert len(options.reasoning_end) == 1
            assert any(model.tells)
            reasons.append(choice.reasoning)
            assert choice.finish is not None
            # The reasoning and what closes it, and the last token of what opens it, if the model does.
            assert choice.finish.usage.num_reasoning_tokens == sum(model.tells) + bool(opens)
            # Where it may, the model can also answer without reasoning.
            if not end:
                model = Model(model_dir, name, seed)
                wanted = "<|channel|>final<|message|>" if name == "harmony" else "a"
                choice, _ = await reply(service, model, chat_request(), wanted)
                assert re.fullmatch(FORM, choice.text), choice.text
                assert (choice.reasoning, any(model.tells)) == ("", False)
                assert choice.finish is not None
                assert choice.finish.usage.num_reasoning_tokens == 0
    assert any(reasons)


@pytest.mark.parametrize("name", ["hermes", "deepseek_v3", "glm4"])
async def test_a_prompt_that_has_closed_the_reasoning_is_followed_by_the_form(
    reasoners: dict[tuple[str, str], Path], tmp_path: Path, name: str
) -> None:
    model_dir = reasoners[name, "<think>\n\n</think>\n\n"]
    async with serving(model_dir, tmp_path, name) as service:
        choice, options = await reply(service, Model(model_dir, name, 0), chat_request())
    assert re.fullmatch(FORM, choice.text)
    assert (choice.reasoning, options.reasoning_end) == ("", ())


@pytest.mark.parametrize(("name", "end"), list(openings()))
async def test_a_form_may_begin_at_once(
    reasoners: dict[tuple[str, str], Path], tmp_path: Path, name: str, end: str
) -> None:
    model_dir = reasoners[name, end]
    form = {"regex": FORM, "begins_at_once": True}
    async with serving(model_dir, tmp_path, name) as service:
        for seed in range(3):
            choice, options = await reply(service, Model(model_dir, name, seed), chat_request(form=form), "<think>")
            assert re.fullmatch(FORM, choice.text), choice.text
            assert (choice.reasoning, options.reasoning_end) == ("", ())


@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'},
        {"choices": {"texts": ["yes", " no", "\nperhaps\n"]}},
        {"grammar": 'start: "x" text\ntext: /[0-9]{1,3}/'},
        {"grammar": 'root ::= "x" [0-9]'},
        {"json_object": True},
    ],
)
async def test_every_kind_of_form_comes_after_reasoning(
    reasoners: dict[tuple[str, str], Path], tmp_path: Path, form: dict[str, Any]
) -> None:
    model_dir = reasoners["hermes", "<think>\n"]
    async with serving(model_dir, tmp_path, "hermes") as service:
        # Random JSON would hardly ever end.
        wanted = 'hm</think>\n\n{"a": true}' if "json" in str(form) else ""
        choice, _ = await reply(service, Model(model_dir, "hermes", 1), chat_request(form=form), wanted)
    [(kind, value)] = form.items()
    if kind == "choices":
        assert choice.text in value["texts"]
    elif kind == "grammar":
        assert re.fullmatch("x[0-9]{1,3}", choice.text)
    else:
        assert isinstance(json.loads(choice.text), dict)


async def test_raw_text_has_the_form_from_its_first_token(
    reasoners: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    model_dir = reasoners["hermes", "<think>\n"]
    async with serving(model_dir, tmp_path, "hermes") as service:
        choice, options = await reply(service, Model(model_dir, "hermes", 0), chat_request(raw_text=True))
        text = tokenizer_pb2.GenerateRequest(text="hi", structured_output={"regex": FORM})
        other, _ = await reply(service, Model(model_dir, "hermes", 0), text)
    assert re.fullmatch(FORM, choice.text)
    assert options.reasoning_end == ()
    assert re.fullmatch(FORM, other.text)


@pytest.mark.parametrize("form", [{"regex": FORM}, {"json_object": True}, {"json_schema": "{}"}])
@pytest.mark.parametrize("name", sorted(REASONERS))
async def test_a_call_that_must_be_made_has_the_same_grammar_beside_a_form(
    reasoners: dict[tuple[str, str], Path], tmp_path: Path, name: str, form: dict[str, Any]
) -> None:
    grammars, not_enforced = [], []
    async with serving(reasoners[name, REASONERS[name][0]], tmp_path, name) as service:
        for given in (None, form):
            request = chat_request(tools=TOOLS, form=given)
            request.chat.tool_mode = tokenizer_pb2.TOOL_MODE_REQUIRED
            call, sent = await submit(service, request)
            end = make_end(sent.handle, common_pb2.FINISH_REASON_EOS, 1, stop_token_id=IM_END_ID)
            service.peer.send(Row(sent.handle, 0, [IM_END_ID]), ends=[end])
            [choice] = (await read_answer(call)).choices.values()
            grammars.append(decode_options(sent.options).grammar)
            not_enforced.append(list(choice.accepted.not_enforced))
    assert "look" in grammars[0]
    assert grammars[1] == grammars[0]
    assert not_enforced == [[], [""]]


@pytest.mark.parametrize("name", sorted(REASONERS))
async def test_beside_tools_the_answer_is_a_call_or_the_form(
    reasoners: dict[tuple[str, str], Path], tmp_path: Path, name: str
) -> None:
    end, close = REASONERS[name]
    model_dir = reasoners[name, end]
    after = {"hermes": "\n\n", "generic": "\n\n", "glm4": "\n", "deepseek_v3": ""}.get(name)
    calls = {
        "hermes": "<tool_call>",
        "generic": "<tool_call>",
        "glm4": "<tool_call>",
        "deepseek_v3": "<｜tool▁calls▁begin｜>",
        "harmony": "<|channel|>commentary",
    }[name]
    async with serving(model_dir, tmp_path, name) as service:
        request = chat_request(tools=TOOLS, form={"regex": FORM})
        kinds = set()
        for seed, wanted in enumerate(
            ("", calls) if after is None else (f"{close}{after}ab", f"{close}{after}{calls}")
        ):
            choice, _ = await reply(service, Model(model_dir, name, seed), request, wanted)
            if choice.tool_calls:
                assert {call.name for call in choice.tool_calls} == {"look"}
                assert all(json.loads(call.arguments).keys() <= {"a"} for call in choice.tool_calls)
                assert choice.text == ""
            else:
                assert re.fullmatch(FORM, choice.text), choice.text
            kinds.add(bool(choice.tool_calls))
    assert True in kinds


async def test_text_of_a_form_is_never_read_as_markup(reasoners: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    model_dir = reasoners["hermes", "<think>\n"]
    text = '\n<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    async with serving(model_dir, tmp_path, "hermes") as service:
        # With other tokens than those of the markup.
        form = {"choices": {"texts": [text]}}
        call, sent = await submit(service, chat_request(form=form))
        ids = Tokenizer.from_file(str(model_dir / TOKENIZER)).encode("hm</think>\n\n" + text).ids
        end = make_end(sent.handle, common_pb2.FINISH_REASON_MAX_TOKENS, len(ids))
        service.peer.send(Row(sent.handle, 0, ids), ends=[end])
        [choice] = (await read_answer(call)).choices.values()
    assert (choice.reasoning, choice.text) == ("hm", text)


@pytest.mark.parametrize("num_tokens", [1, 3])
async def test_a_reply_that_ends_while_it_reasons_has_no_text(
    reasoners: dict[tuple[str, str], Path], tmp_path: Path, num_tokens: int
) -> None:
    model_dir = reasoners["hermes", "<think>\n"]
    async with serving(model_dir, tmp_path, "hermes") as service:
        call, sent = await submit(service, chat_request())
        ids = Tokenizer.from_file(str(model_dir / TOKENIZER)).encode("the dog").ids[:num_tokens]
        end = make_end(sent.handle, common_pb2.FINISH_REASON_MAX_TOKENS, len(ids))
        service.peer.send(Row(sent.handle, 0, ids), ends=[end])
        [choice] = (await read_answer(call)).choices.values()
    assert choice.text == ""
    assert "the dog".startswith(choice.reasoning)
