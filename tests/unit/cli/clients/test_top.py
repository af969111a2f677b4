"""What `lockstep top` prints: a function of two states and the time between them."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.v1 import scheduler_pb2
from services.cli.clients import top

STATE = scheduler_pb2.GetStateResponse(
    instance_id="a",
    ready=True,
    num_waiting=3,
    num_running=128,
    block_size=16,
    num_blocks=1000,
    num_used_blocks=250,
    num_cached_blocks=300,
    num_free_blocks=750,
    num_prefill_steps=12,
    num_decode_steps=340,
    num_preemptions=5,
    num_prefix_queried_tokens=1000,
    num_prefix_hit_tokens=400,
    num_finished=60,
    num_completion_tokens=8000,
    num_draft_tokens=500,
    num_accepted_draft_tokens=350,
)


def test_the_context_has_a_line_and_so_has_a_pool_that_holds_less() -> None:
    assert "context" not in top.render("a", STATE)
    for num_pool_tokens, line in ((9000, "8192"), (480, "8192   480 fit the KV pool")):
        state = changed(context_length=8192, num_pool_tokens=num_pool_tokens)
        assert f"context                   {line}" in top.render("a", state).splitlines()


def changed(**fields: Any) -> scheduler_pb2.GetStateResponse:
    state = scheduler_pb2.GetStateResponse()
    state.CopyFrom(STATE)
    state.MergeFrom(scheduler_pb2.GetStateResponse(**fields))
    return state


def test_a_first_snapshot_has_totals_only() -> None:
    assert top.render("127.0.0.1:50052", STATE) == (
        "scheduler 127.0.0.1:50052: ready\n"
        "\n"
        "requests waiting             3\n"
        "requests running           128\n"
        "KV blocks used             250   25.0% of 1000\n"
        "KV blocks cached           300\n"
        "KV blocks free             750   including cached ones\n"
        "\n"
        "                   since start\n"
        "prompt tokens             1000\n"
        "completion tokens         8000\n"
        "prefill steps               12\n"
        "decode steps               340\n"
        "preemptions                  5\n"
        "requests finished           60\n"
        "prefix hit rate          40.0%\n"
        "drafts accepted          70.0%\n"
        "resumes                      0   of 0 losses of workers\n"
    )


def test_saved_states_are_shown_where_there_are_any() -> None:
    lines = top.render("x:1", changed(num_checkpoints=40, num_used_checkpoints=10)).splitlines()
    assert lines[6:8] == [
        "KV blocks free             750   including cached ones",
        "states saved                10   25.0% of 40",
    ]


def test_the_model_is_named_if_it_is_known() -> None:
    assert top.render("x:1", STATE, model="tiny").startswith("scheduler x:1: ready\nmodel     tiny\n\nrequests waiting")


def test_while_no_scheduler_answers_the_last_state_is_shown() -> None:
    text = top.render_silence("x:1", STATE, 2.6, model="tiny")
    assert text.startswith("scheduler x:1: has not answered for 3 s; trying again\nmodel     tiny\n\nbefore that:\n")
    assert text.endswith(top.render("x:1", STATE).partition("\n")[2])


def test_a_single_rank_has_a_line_too() -> None:
    lines = top.render("x:1", changed(rank_steps=[{"is_attached": True, "num_decode_steps": 7}])).splitlines()
    assert lines[-1].split() == ["0", "yes", "0", "0", "0.0%", "7", "0.0%"]


def test_rates_are_per_second_since_the_previous_snapshot() -> None:
    later = changed(
        num_prefill_steps=13,
        num_decode_steps=540,
        num_finished=70,
        num_completion_tokens=9000,
        num_prefix_queried_tokens=1200,
        num_prefix_hit_tokens=550,
        num_draft_tokens=540,
        num_accepted_draft_tokens=360,
    )

    lines = top.render("x:1", later, STATE, elapsed_s=2.0).splitlines()

    assert lines[-10:] == [
        "                   since start   last 2.0 s",
        "prompt tokens             1200   100.0/s",
        "completion tokens         9000   500.0/s",
        "prefill steps               13   0.5/s",
        "decode steps               540   100.0/s",
        "preemptions                  5   0.0/s",
        "requests finished           70   5.0/s",
        "prefix hit rate          45.8%   75.0%",
        "drafts accepted          66.7%   25.0%",
        "resumes                      0   of 0 losses of workers",
    ]


def test_a_share_of_nothing_is_a_dash() -> None:
    nothing = scheduler_pb2.GetStateResponse()
    text = top.render("x:1", nothing, nothing, elapsed_s=1.0)
    assert text.startswith("scheduler x:1: no worker is attached\n")
    assert "KV blocks used               0   0.0% of 0\n" in text
    assert "prefix hit rate              -   -\ndrafts accepted              -   -\n" in text


@pytest.mark.parametrize(
    ("ready", "takes_work", "verdict"),
    [
        (True, True, "ready"),
        (True, None, "ready"),
        (True, False, "no worker takes new requests: they drain, or try requests that may have crashed them"),
        (False, False, "no worker is attached"),
        (False, None, "no worker is attached"),
    ],
)
def test_the_heading_tells_whether_a_request_would_be_computed(
    ready: bool, takes_work: bool | None, verdict: str
) -> None:
    state = scheduler_pb2.GetStateResponse(ready=ready, takes_work=takes_work)
    assert top.render("x:1", state).splitlines()[0] == f"scheduler x:1: {verdict}"


def test_a_restarted_scheduler_is_not_compared_with_its_predecessor() -> None:
    restarted = changed(instance_id="b")
    assert top.render("x:1", restarted, STATE, elapsed_s=1.0) == top.render("x:1", restarted)


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "soon"])
def test_an_invalid_interval_is_refused(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        top.main([f"--interval={interval}"])
    assert caught.value.code == 2
    assert "--interval" in capsys.readouterr().err


def test_a_rank_that_drains_says_so() -> None:
    ranks = [{"is_attached": True}, {"is_attached": True, "is_draining": True}, {"is_draining": True}]
    text = top.render("x:1", changed(rank_steps=ranks))
    assert [line.split()[1] for line in text.splitlines()[-3:]] == ["yes", "draining", "no"]


def test_ranks_come_and_go_between_two_snapshots() -> None:
    before = changed(rank_steps=[{"dp_rank": 0, "num_decode_steps": 5}, {"dp_rank": 2, "num_decode_steps": 10}])
    now = changed(rank_steps=[{"dp_rank": 1, "num_decode_steps": 3}, {"dp_rank": 2, "num_decode_steps": 30}])
    lines = [line.split() for line in top.render("x:1", now, before, elapsed_s=2.0).splitlines()[-2:]]
    assert [(line[0], line[5:]) for line in lines] == [("1", ["3", "0.0%"]), ("2", ["30", "0.0%", "10.0"])]


def test_the_last_events_are_told_in_words() -> None:
    names = scheduler_pb2.CellEvent.Kind.keys()[1:]
    events = [scheduler_pb2.CellEvent(kind=name) for name in names]
    for event in events:
        event.time.FromSeconds(3661)
    lost, attached, tried = events[1], events[0], events[7]
    lost.MergeFrom(scheduler_pb2.CellEvent(dp_ranks=[1], reason="a link broke"))
    attached.dp_ranks.extend([0, 1])
    attached.duration.FromMilliseconds(1250)
    tried.num_requests = 3
    state = changed(events=[*events, lost, attached, tried])
    assert top.render("a", state).splitlines()[-6:] == [
        "last events (UTC)",
        "01:01:01  no request is suspected",
        "01:01:01  a request that crashes its workers ended",
        "01:01:01  rank 1: lost: a link broke",
        "01:01:01  ranks 0, 1: attached after 1250 ms",
        "01:01:01  suspected requests tried (3)",
    ]
    for event in events:
        assert "another kind" not in top.render("a", changed(events=[event]))
