from __future__ import annotations

import asyncio

import pytest

from services.tokenizer.answer.answer import Choice, Generation
from services.tokenizer.answer.completion import Completion
from services.tokenizer.answer.request_totals import RequestTotals
from services.tokenizer.server.live_requests import LiveRequests
from services.tokenizer.text.detokenizer import ByteLevelDetokenizer
from shared.errors import DrainingError, DuplicateRequestError


def test_an_id_is_free_again_when_its_request_has_ended() -> None:
    live = LiveRequests()
    with live.admit("a", ["a"]):
        with pytest.raises(DuplicateRequestError), live.admit("a", ["a"]):
            pass
        with live.admit("a", ["b"]):
            pass
    with live.admit("a", ["a"]):
        pass


def test_either_all_or_none_of_several_ids_are_held() -> None:
    live = LiveRequests()
    with live.admit("a", ["a", "a-0", "a-1"]):
        with pytest.raises(DuplicateRequestError), live.admit("a", ["a-1"]):
            pass
        with pytest.raises(DuplicateRequestError), live.admit("a", ["b", "a-0"]):
            pass
        with live.admit("a", ["b"]):
            pass
    with live.admit("a", ["a-1"]):
        pass


async def test_draining_waits_for_the_last_request() -> None:
    live = LiveRequests()
    with live.admit("a", ["a"]):
        draining = asyncio.create_task(live.drain(60, asyncio.Event()))
        await asyncio.sleep(0)
        with pytest.raises(DrainingError):
            live.check_open()
        assert not draining.done()
    assert await draining == 0


async def test_requests_that_remain_after_the_grace_period_get_an_error() -> None:
    live = LiveRequests()
    generation = Generation(arrived_at=0, totals=RequestTotals())
    generation.choices.append(Choice(generation, Completion(ByteLevelDetokenizer({}, {}), ()), num_prompt_tokens=1))
    with live.admit("a", ["encoding"]), live.admit("a", ["streaming"]):
        live.begin("a", "streaming", generation)
        assert await live.drain(0, asyncio.Event()) == 2
    with pytest.raises(DrainingError, match="continue_final_message"):
        await anext(generation.responses())


async def test_a_second_signal_ends_the_drain() -> None:
    live, is_urgent = LiveRequests(), asyncio.Event()
    with live.admit("a", ["a"]):
        draining = asyncio.create_task(live.drain(60, is_urgent))
        is_urgent.set()
        assert await draining == 1


async def test_draining_without_requests_ends_at_once() -> None:
    live = LiveRequests()
    assert await live.drain(60, asyncio.Event()) == 0
    with pytest.raises(DrainingError):
        live.check_open()
