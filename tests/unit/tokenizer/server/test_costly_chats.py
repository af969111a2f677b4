"""A chat whose template costs too much ends alone, and costs its service nothing that lasts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import psutil
import pytest

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.template_renderer import TemplateRenderer
from tests.support.models.tiny_tokenizer import write_tiny_tokenizer
from tests.support.system.polling import poll_until
from tests.support.system.processes import running_children
from tests.support.tokenizer.tokenizer_service import Service, run_tokenizer_service

pytestmark = pytest.mark.process

LOOP = "{{% for _ in range(99999) %}}{}{{% endfor %}}"
COSTLY = (
    "{% if messages[0].content == 'slow' %}" + LOOP.format(LOOP.format(LOOP.format(""))) + "{% endif %}"
    "{% if messages[0].content == 'big' %}{% set ns = namespace(a=['x']) %}"
    "{% for _ in range(64) %}{% set ns.a = ns.a + ns.a %}{% endfor %}{% endif %}"
    "{{ messages[0].content }}"
)


@pytest.fixture
async def costly(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    """A service with such a template, linked to its cell."""
    directory = tmp_path_factory.mktemp("costly")
    write_tiny_tokenizer(directory, chat_template=COSTLY)
    async with run_tokenizer_service(directory, directory, make_renderer=TemplateRenderer) as service:
        await service.link()
        yield service


async def rendering() -> set[psutil.Process]:
    """The processes that render chats for this one."""
    servers = [each for each, command in running_children().items() if "render_process" in " ".join(command)]
    return {child for server in servers for child in running_children(server.pid)}


def render(service: Service, content: str) -> Any:
    message = tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_USER, content=content)
    return service.stub.RenderChat(tokenizer_pb2.RenderChatRequest(chat={"messages": [message]}))


async def test_calls_that_are_cancelled_leave_nothing_that_is_rendered_for_ever(
    costly: Service, caplog: pytest.LogCaptureFixture
) -> None:
    # As many as there are threads; each is rendered until its limit, cancelled or not.
    others = await rendering()
    calls = [asyncio.ensure_future(render(costly, "slow")) for _ in range(2)]
    await poll_until(rendering, lambda processes: len(processes - others) == 2)
    for call in calls:
        call.cancel()
    assert (await render(costly, "quick")).text == "quick"
    ended = [record for record in caplog.records if record.message == "rendering a chat was ended"]
    assert {vars(record)["cause"] for record in ended} == {"cpu"}


@pytest.mark.parametrize(("content", "limit"), [("slow", "1 s of CPU time"), ("big", "256 MiB of memory")])
async def test_a_chat_that_costs_too_much_is_an_invalid_request_and_others_go_on(
    costly: Service, content: str, limit: str
) -> None:
    refused, answered = render(costly, content), render(costly, "quick")
    assert (await answered).text == "quick"
    with pytest.raises(grpc.aio.AioRpcError, match=f"it takes more than {limit}") as caught:
        await refused
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
