"""The page in a real browser: a chat, and the cell, whose rank is killed meanwhile."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from selenium.webdriver.common.keys import Keys

from lockstep.v1 import scheduler_pb2
from tests.support.cells.cell import Cell, start_cell
from tests.support.clients.browser import Browser, run_browser
from tests.support.clients.key_files import key_line, write_keys
from tests.support.models.tiny_tokenizer import IM_END_ID
from tests.support.models.tool_caller import MARKUP, write_tool_caller
from tests.support.system.ports import free_port
from tests.support.tokenizer.http_client import run_http_service

pytestmark = [pytest.mark.slow, pytest.mark.process]

# Long enough that an answer is stopped in its middle.
CONTEXT_LENGTH = 16384
NARROW = 360
# Of the tool caller's vocabulary.
THINK, END_THINK = 420 + MARKUP.index("<think>"), 420 + MARKUP.index("</think>")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with run_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def cell(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    """A cell of two ranks without keys, as for a developer; there is none without a browser."""
    model_dir = write_endless_model(tmp_path_factory.mktemp("page") / "model")
    with start_cell(model_dir, f"--http-listen=127.0.0.1:{free_port()}", "--dp=2") as cell:
        yield cell


@pytest.fixture
def page(browser: Browser, cell: Cell) -> Iterator[Browser]:
    """The cell's page, which must give the browser nothing to complain about."""
    browser.open(f"http://{cell.http_address}/")
    browser.wait_until(lambda: browser.texts("#totals dd"), "the cell is shown")
    yield browser
    assert browser.complaints() == []


def write_endless_model(directory: Path) -> Path:
    """Write a model whose greedy answers never end: the logit of the token that would end them is 0."""
    write_tool_caller(directory, num_layers=1, context_length=CONTEXT_LENGTH)
    path = directory / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][IM_END_ID] = 0
    save_file(weights, path, metadata={"format": "pt"})
    return directory


def read_state(cell: Cell) -> Any:
    with urllib.request.urlopen(f"http://{cell.http_address}/lockstep/state") as answer:
        return json.load(answer)


def answer_of(page: Browser) -> str:
    return page.texts(".turn:last-child .text")[-1]


def fill(page: Browser, **fields: object) -> None:
    """Set fields of the chat by their ids; None empties one."""
    for name, value in fields.items():
        script = "document.getElementById(arguments[0]).value = arguments[1] ?? ''"
        page.driver.execute_script(script, name, value)


def ask(page: Browser, *, max_tokens: int | None = None) -> None:
    """Send a message that has always the same answer."""
    fill(page, temperature=0, max_tokens=max_tokens, message="hello")
    page.find("#message").send_keys(Keys.ENTER)


def wait_for_answer(page: Browser) -> None:
    page.wait_until(lambda: page.find("#send").is_enabled(), "the answer has ended")


def test_an_answer_streams_and_a_stop_ends_its_request(page: Browser, cell: Cell) -> None:
    ask(page)
    page.wait_until(lambda: answer_of(page), "an answer begins")
    so_far = answer_of(page)
    page.wait_until(lambda: len(answer_of(page)) > len(so_far), "the answer goes on")
    page.wait_until(lambda: page.texts("#totals dd")[1] == "1", "the page tells that a request is running")
    page.find("#stop").click()
    page.wait_until(lambda: "Stopped." in page.texts(".note"), "the answer has ended")
    page.wait_until(lambda: read_state(cell)["numRunning"] == 0, "its request has ended too")
    assert answer_of(page).startswith(so_far)
    assert page.find("#send").is_enabled()


def test_a_token_tells_its_probability_to_the_pointer_and_the_keyboard(page: Browser) -> None:
    ask(page, max_tokens=8)
    wait_for_answer(page)
    titles = page.evaluate("[...document.querySelectorAll('.text span')].map((span) => span.title)")
    assert isinstance(titles, list)
    assert titles
    assert all("%" in title for title in titles)
    page.find(".turn [role=group]").send_keys(Keys.ARROW_RIGHT)
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert page.evaluate("document.activeElement.title") == titles[0] == page.texts(".turn [aria-live]")[0]


def test_the_next_question_has_the_conversation_and_an_error_is_told(page: Browser) -> None:
    for num_answers in (1, 2):
        ask(page, max_tokens=4)
        wait_for_answer(page)
        assert len(page.texts(".turn")) == 2 * num_answers
    num_prompt_tokens = [int(text.split()[0]) for text in page.texts(".note") if "prompt tokens" in text]
    assert num_prompt_tokens[1] > num_prompt_tokens[0]
    ask(page, max_tokens=CONTEXT_LENGTH)
    page.wait_until(lambda: page.find("#failure").text, "the server's message is shown")
    assert str(CONTEXT_LENGTH) in page.find("#failure").text
    assert page.evaluate("document.getElementById('message').value") == "hello"
    assert len(page.texts(".turn")) == 4
    [complaint] = page.complaints()
    assert "status of 400" in complaint
    page.find("#clear").click()
    assert page.texts(".turn") == []
    ask(page, max_tokens=4)
    wait_for_answer(page)
    assert page.texts("#failure") == [""]


def test_a_killed_rank_is_seen_to_go_and_to_come_back(page: Browser, cell: Cell) -> None:
    cell.kill("worker 1.0")
    page.wait_until(lambda: page.texts("[data-kind=KIND_LOST]"), "its loss is told")
    lost = "document.querySelector('[data-rank=\"1\"] path.lost').getAttribute('d')"
    page.wait_until(lambda: page.evaluate(lost), "its chart has a gap")
    page.wait_until(lambda: page.texts("[data-rank='1'][data-condition=attached]"), "it is back")
    page.wait_until(lambda: "after" in page.texts("#events li")[0], "its return is told")
    newest, *_ = page.texts("#events [data-kind=KIND_ATTACHED]")
    assert "rank 1: attached after " in newest
    assert newest.endswith(" ms")
    assert "rank 1: lost: " in page.texts("[data-kind=KIND_LOST]")[0]


def test_the_keyboard_reaches_everything_and_shows_where_it_is(page: Browser) -> None:
    reached: list[object] = []
    while "events" not in reached:
        page.press(Keys.TAB)
        name = page.evaluate("document.activeElement.id || document.activeElement.tagName")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", name
        reached.append(name)
        if name == "SUMMARY":
            page.press(Keys.ENTER)
        assert len(reached) < 30, reached
    controls = ["temperature", "top_p", "max_tokens", "seed", "system", "logprobs"]
    assert reached == ["conversation", "message", "send", "clear", "SUMMARY", *controls, "events"]
    # Only greedy answers never end.
    fill(page, temperature=0)
    page.driver.execute_script("document.getElementById('message').focus()")
    page.press("hello", Keys.TAB, Keys.SPACE)
    page.wait_until(lambda: answer_of(page), "an answer begins")
    assert page.evaluate("document.activeElement.id") == "stop"
    page.press(Keys.SPACE)
    page.wait_until(lambda: page.evaluate("document.activeElement.id") == "message", "the focus is not lost")


def test_a_telephone_shows_it_all_and_a_dark_one_is_dark(page: Browser) -> None:
    page.resize(NARROW)
    page.find("summary").click()
    ask(page, max_tokens=200)
    wait_for_answer(page)
    assert page.evaluate("innerWidth") == NARROW
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    colors = []
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        colors.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    page.prefer("")
    assert colors == ["rgb(255, 255, 255)", "rgb(20, 23, 26)"]


async def test_with_keys_a_client_has_the_chat_and_an_operator_the_cell_too(browser: Browser, tmp_path: Path) -> None:
    """The scheduler is played by the test: it answers with reasoning, which a random model does not have."""
    keys = write_keys(tmp_path / "keys", key_line("one"), key_line("operator", "ops", is_operator=True))
    model_dir, port = write_tool_caller(tmp_path / "model"), free_port()
    settings = {"client_keys": keys, "http_listen": f"127.0.0.1:{port}"}
    async with run_http_service(model_dir, tmp_path, **settings) as http:
        peer = http.service.peer
        peer.state = scheduler_pb2.GetStateResponse(ready=True, tenants=[scheduler_pb2.TenantState(name="somebody")])

        async def wait_until(text: str) -> None:
            await asyncio.to_thread(browser.wait_until, lambda: text in browser.find("body").text, text)

        await asyncio.to_thread(browser.open, f"http://127.0.0.1:{port}/")
        assert await asyncio.to_thread(browser.complaints) == [], "nothing is asked for without a key"
        await asyncio.to_thread(browser.find("#key").send_keys, "one", Keys.ENTER)
        await wait_until("Not shown: ")
        assert peer.states_asked.empty()
        browser.evaluate("document.getElementById('logprobs').click()")
        await asyncio.to_thread(browser.find("#message").send_keys, "hello", Keys.ENTER)
        http.send(await peer.submits.get(), [THINK, 70, END_THINK, 80, 81])
        await asyncio.to_thread(wait_for_answer, browser)
        assert await asyncio.to_thread(browser.texts, ".reasoning .text") != [""]
        assert not await asyncio.to_thread(browser.find(".reasoning .text").is_displayed)
        await asyncio.to_thread(browser.find("#key").send_keys, Keys.CONTROL, "a", Keys.NULL, "operator", Keys.ENTER)
        await wait_until("somebody: 0 waiting")
