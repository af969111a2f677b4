"""Models with inconsistent files: what prevents the start, and what is logged at start and refused later."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import grpc
import pytest
from tokenizers import AddedToken, Tokenizer, decoders

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.request.model import load_model
from shared.model_files.model_dir import CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZER, ModelDirectoryError
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.models.tiny_tokenizer import VOCABULARY_SIZE, tiny_tokenizer, write_tiny_tokenizer
from tests.support.tokenizer.tokenizer_service import Service, run_tokenizer_service

CALL = "<call>"
# Writes a token that the model lacks for any messages.
CHAT_WITH_CALL = "{% for message in messages %}{{ message['content'] }}{% endfor %}<call>"

Request = tokenizer_pb2.GenerateRequest
Form = tokenizer_pb2.StructuredOutput


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with the tiny tokenizer, to be damaged."""
    directory = tmp_path / "model"
    directory.mkdir()
    write_tiny_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(directory / TOKENIZER))


def with_unknown_tokens(directory: Path) -> None:
    """Add tokens that the model has no embedding for."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(CALL), AddedToken("</call>")])
    write_tokenizer(directory, tokenizer)
    (directory / CHAT_TEMPLATE).write_text(CHAT_WITH_CALL)


def with_unreadable_tokenizer(directory: Path) -> None:
    """Write a tokenizer that encodes and decodes, of a kind that the grammar library does not know."""
    tokenizer = tiny_tokenizer()
    tokenizer.decoder = decoders.WordPiece()
    write_tokenizer(directory, tokenizer)


async def refusal(service: Service, request: Request) -> tuple[grpc.StatusCode, str | None, str]:
    """The status, reason and message of a request that must not reach the cell."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.Generate(request).read()
    assert service.peer.submits.empty()
    error = caught.value
    return error.code(), reason_of(status_from_rpc_error(error)), str(error.details())


def any_chat() -> Request:
    """A conversation."""
    message = tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_USER, content="Hello")
    return Request(chat=tokenizer_pb2.Chat(messages=[message]))


@pytest.mark.parametrize("eos", [VOCABULARY_SIZE, [2, 10_000]])
def test_an_eos_token_outside_the_vocabulary_prevents_the_start(directory: Path, eos: object) -> None:
    (directory / GENERATION_CONFIG).write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ModelDirectoryError) as caught:
        load_model(TokenizerSettings(model_dir=directory))
    for word in ("generation_config.json", "eos_token_id", str(eos), f"{VOCABULARY_SIZE} tokens"):
        assert word in str(caught.value)


async def test_features_that_need_a_missing_token_are_logged_at_start_and_refused(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_unknown_tokens(directory)
    with caplog.at_level(logging.WARNING):
        async with run_tokenizer_service(directory, tmp_path) as service:
            await service.link()
            requests = [Request(text=f"The {CALL} fox"), any_chat()]
            refusals = [await refusal(service, request) for request in requests]
            grammar = Request(text="fox", structured_output=Form(grammar="start: <[420]> <[421]>"))
            grammar_refusal = await refusal(service, grammar)
            # All other features work.
            json_request = Request(text="The fox", structured_output=Form(json_schema='{"type": "integer"}'))
            call, _ = await service.begin(json_request)
            call.cancel()
            await service.peer.aborts.get()
    (warning,) = caplog.records
    assert "tokens that the model does not" in warning.message
    assert (warning.__dict__["num_unknown"], warning.__dict__["unknown"]) == (2, "420 <call>, 421 </call>")
    for code, reason, message in refusals:
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert message == "prompt: it contains the tokenizer's token 420, but the model only knows ids below 420"
    assert grammar_refusal[:2] == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert "no text fits" in grammar_refusal[2]


async def test_structured_output_that_the_library_cannot_compile_is_logged_at_start_and_refused(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_unreadable_tokenizer(directory)
    with caplog.at_level(logging.WARNING):
        async with run_tokenizer_service(directory, tmp_path) as service:
            await service.link()
            refused = await refusal(service, Request(text="The fox", structured_output=Form(regex="[a-z]+")))
            call, submit = await service.begin(
                Request(text="The fox", sampling=common_pb2.SamplingParams(min_tokens=2, max_tokens=3))
            )
            call.cancel()
            await service.peer.aborts.get()
            assert submit.max_tokens == 3
    (warning,) = caplog.records
    assert "structured output" in warning.message
    assert "decoder" in warning.__dict__["error"]
    assert refused == (
        grpc.StatusCode.UNIMPLEMENTED,
        "NOT_SUPPORTED",
        "structured_output.regex: grammars cannot be compiled for this model's tokenizer",
    )
