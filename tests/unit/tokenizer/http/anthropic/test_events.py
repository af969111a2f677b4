"""The events of Messages, of any sequence of responses."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.anthropic.events import MessageAnswer, MessageEvents
from services.tokenizer.http.fields.thinking_signatures import hidden_thinking
from tests.support.tokenizer.messages import added_up, any_responses, make_facts, messages_events


async def _whole(responses: list[tokenizer_pb2.GenerateResponse], *, hides: bool) -> object:
    answer = MessageAnswer(make_facts(hides_reasoning=hides))
    for response in responses:
        await answer.write(response)
    return json.loads(json.dumps(answer.value()))


@given(any_responses(), st.booleans())
async def test_events_add_up_to_the_whole_answer(responses: list[tokenizer_pb2.GenerateResponse], hides: bool) -> None:
    events = MessageEvents(make_facts(hides_reasoning=hides))
    message = added_up(messages_events(b"".join(map(events.make, responses)) + events.end()))
    assert message == await _whole(responses, hides=hides)
    reasoning = "".join(response.reasoning for response in responses)
    blocks = message["content"]
    shown = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    hidden = "".join(hidden_thinking(block["signature"]) for block in blocks if block["type"] == "thinking")
    assert (shown, hidden) == (("", reasoning) if hides else (reasoning, ""))
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    assert text == "".join(response.text for response in responses)
    # What was found in the cache is not counted twice.
    usage = message["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 4, 9)


def test_only_our_own_signatures_are_read() -> None:
    for signature in ("", "EqQBCgIYAhIM", "lockstep1.", "lockstep1.!", "lockstep1./w=="):
        assert hidden_thinking(signature) == ""
