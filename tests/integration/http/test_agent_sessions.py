"""Recorded sessions of agents go on after kills of worker and scheduler: their streams are those of a quiet cell.

A session is what a client asked in the turns of one task. That of an agent is as a director of `tests/clients` passed
it on: instructions are cut, and tools that it does not call are left out. Reasoning that goes back is shortened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cells.cell import REFERENCE, Cell, start_cell
from tests.support.models.tool_caller import write_tool_caller
from tests.support.system.ports import free_port
from tests.support.tokenizer.http_client import named_events_of

SESSIONS = Path(__file__).parents[2] / "support" / "clients" / "sessions"
# Who dies in a turn, while it is streamed.
DOOMED = {0: "worker", 1: "scheduler"}
# In the log of a request that went on after a death.
RESUMED = "num_resumes="
# What is made anew for each answer.
_IDS = re.compile(r"\b(?:resp|msg|fc|ctc|rs|call|toolu)_[0-9a-f]{16,}")
# What an answer says of the deaths.
_RESUMES = re.compile(r'"resume_count": \d+, ')
_MOMENTS = ("created_at", "completed_at")


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    """A cell whose answers depend only on the request."""
    model_dir = write_tool_caller(tmp_path_factory.mktemp("agents"), num_layers=1, context_length=16_384)
    flags = (REFERENCE, "--scheduler.no-enable-prefix-caching", f"--http-listen=127.0.0.1:{free_port()}")
    with start_cell(model_dir, *flags) as cell:
        yield cell


def canonical(stream: bytes) -> bytes:
    """A stream's events with ids by the order in which they occur.

    Deltas are joined, because one event has all tokens that came since the last; there is no word of a silence.
    """
    joined: list[dict[str, Any]] = []
    for event in named_events_of(stream):
        for moment in _MOMENTS:
            event.get("response", {}).pop(moment, None)
        event.pop("sequence_number", None)
        if event["type"] != "ping" and not (joined and _is_joined(joined[-1], event)):
            joined.append(event)
    text = _RESUMES.sub("", json.dumps(joined))
    ids = {found: f"id-{number}" for number, found in enumerate(dict.fromkeys(_IDS.findall(text)))}
    return _IDS.sub(lambda match: ids[match[0]], text).encode()


def _is_joined(last: dict[str, Any], event: dict[str, Any]) -> bool:
    """Whether an event is a delta of the same part as the last one, to which it is then added."""
    if not event["type"].endswith("delta") or {**last, "delta": 0} != {**event, "delta": 0}:
        return False
    if isinstance(event["delta"], str):
        last["delta"] += event["delta"]
        return True
    kinds = [name for name in event["delta"] if name != "type"]
    if kinds != [name for name in last["delta"] if name != "type"]:
        return False
    for name in kinds:
        last["delta"][name] += event["delta"][name]
    return True


@pytest.mark.slow
@pytest.mark.parametrize("client", sorted(path.stem for path in SESSIONS.glob("*.json")))
async def test_a_session_is_the_same_when_worker_and_scheduler_are_killed(cell: Cell, client: str) -> None:
    recorded = json.loads((SESSIONS / f"{client}.json").read_text(encoding="utf-8"))
    async with cell.http_session() as session:
        async with session.get("/v1/models") as response:
            [model] = (await response.json())["data"]

        killed = list[int]()

        async def ask(number: int, doomed: str | None = None) -> bytes:
            body = {**recorded["bodies"][number], "model": model["id"], "seed": number}
            async with session.post(recorded["path"], json=body) as response:
                data = await response.content.readany()
                assert response.status == 200, data
                if doomed is not None:
                    killed.append(cell.kill(doomed))
                return canonical(data + await response.read())

        turns = range(len(recorded["bodies"]))
        quiet = [await ask(number) for number in turns]
        for number in turns:
            doomed, num_resumed = DOOMED.get(number), cell.log().count(RESUMED)
            assert await ask(number, doomed) == quiet[number]
            # Once more if the answer had ended before the kill.
            while doomed is not None and cell.log().count(RESUMED) == num_resumed:
                await cell.wait_until_serving(doomed, instead_of=killed[-1])
                assert await ask(number, doomed) == quiet[number]
