"""What a domain's attach says to each thing that can happen; every order of them is left to the model checker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.scheduler.attach import (
    RETRY_DELAY_S,
    Accepted,
    CloseStreams,
    Command,
    DomainAttach,
    Dropped,
    GroupPlace,
    Offer,
    OpenStreams,
    Refused,
    Restart,
    RetryAt,
    RetryDue,
    Standing,
    StreamBroken,
    StreamOpened,
)
from services.scheduler.events import DomainAttached, DomainLost, Exit
from services.scheduler.policy import CellTopology
from tests.support.engine_driver import worker_facts

COUPLED = CellTopology(2, is_coupled=True)


def accepted(group: int, epoch: int = 1, *, place: GroupPlace | None = None, **fields: Any) -> Accepted:
    return Accepted(group, epoch, worker_facts(epoch=epoch), place or GroupPlace(group, 2, 1, True), **fields)


def offered(standing: Standing | None = None) -> DomainAttach:
    """Two coupled groups that have been offered epoch 1."""
    attach = DomainAttach(0, COUPLED, standing or Standing("me"))
    assert attach.on_event(RetryDue(), 0.0) == [Offer(0, 1), Offer(1, 1)]
    return attach


def opening() -> DomainAttach:
    """Both have accepted it."""
    attach = offered()
    assert attach.on_event(accepted(1), 0.0) == []
    assert attach.on_event(accepted(0), 0.0) == [OpenStreams(1)]
    return attach


def attached() -> DomainAttach:
    """Both streams are open."""
    attach = opening()
    assert attach.on_event(StreamOpened(1, 1), 0.0) == []
    facts = (accepted(0).facts, accepted(1).facts)
    assert attach.on_event(StreamOpened(0, 1), 0.0) == [DomainAttached(0, facts)]
    return attach


def retry_of(commands: list[Command]) -> RetryAt:
    """The last command, which is another round after the delay."""
    retry = commands[-1]
    assert isinstance(retry, RetryAt)
    assert retry.when == 5.0 + RETRY_DELAY_S
    return retry


def test_a_domain_is_attached_when_every_group_lets_steps_come() -> None:
    attached()


def test_a_domain_that_was_lost_is_told_once_and_offered_the_next_epoch() -> None:
    attach = attached()
    commands = attach.on_event(StreamBroken(1, 1), 5.0)
    assert commands[:-1] == [CloseStreams(1), DomainLost(0, 1)]
    assert "group 1" in retry_of(commands).reason
    assert attach.on_event(StreamBroken(0, 1), 5.1) == []
    assert attach.on_event(RetryDue(), 5.5) == [Offer(0, 2), Offer(1, 2)]


def test_streams_that_break_before_all_are_open_attach_nothing() -> None:
    attach = opening()
    attach.on_event(StreamOpened(0, 1), 0.0)
    assert [type(command) for command in attach.on_event(StreamBroken(1, 1), 5.0)] == [CloseStreams, RetryAt]
    assert attach.on_event(StreamOpened(1, 1), 5.0) == []


def test_an_epoch_that_the_engine_gives_up_is_closed_and_not_told_back() -> None:
    attach = attached()
    assert attach.on_event(Dropped(2), 5.0) == []
    assert [type(command) for command in attach.on_event(Dropped(1), 5.0)] == [CloseStreams, RetryAt]


def test_another_round_waits_for_all_answers_and_is_above_the_highest_epoch() -> None:
    attach = offered()
    assert attach.on_event(Refused(1, 1, "STALE_EPOCH", 41, "before"), 5.0) == []
    retry = retry_of(attach.on_event(accepted(0), 5.0))
    assert retry.reason == "STALE_EPOCH"
    assert attach.on_event(RetryDue(), 5.5) == [Offer(0, 42), Offer(1, 42)]


def test_answers_of_an_earlier_round_count_for_nothing() -> None:
    attach = offered()
    attach.on_event(Refused(0, 1, "no answer"), 0.0)
    attach.on_event(Refused(1, 1, "no answer"), 0.0)
    attach.on_event(RetryDue(), 0.5)
    for group in range(2):
        assert attach.on_event(accepted(group), 0.6) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"is_stuck": True}, "stuck"), ({"last_step": (1, 8)}, "differ")],
)
def test_groups_that_can_run_nothing_together_are_restarted(changes: dict[str, Any], reason: str) -> None:
    attach = offered()
    attach.on_event(accepted(0, last_step=(1, 9)), 5.0)
    commands = attach.on_event(accepted(1, **{"last_step": (1, 9), **changes}), 5.0)
    assert commands[:-1] == [Restart(0, 1), Restart(1, 1)]
    assert reason in retry_of(commands).reason


def test_a_stuck_group_is_restarted_though_its_partner_is_gone() -> None:
    attach = offered()
    attach.on_event(Refused(0, 1, "UNAVAILABLE"), 5.0)
    assert attach.on_event(accepted(1, is_stuck=True), 5.0)[:-1] == [Restart(1, 1)]


def test_uncoupled_groups_are_attached_each_for_itself() -> None:
    topology = CellTopology(2)
    attach = DomainAttach(1, topology, Standing("me"))
    assert attach.on_event(RetryDue(), 0.0) == [Offer(1, 1)]
    answer = accepted(1, place=GroupPlace(1, 2, 1, False), last_step=(7, 7))
    assert attach.on_event(answer, 0.0) == [OpenStreams(1)]
    assert attach.on_event(StreamOpened(1, 1), 0.0) == [DomainAttached(1, (answer.facts,))]


@pytest.mark.parametrize(
    "place",
    [GroupPlace(0, 2, 1, True), GroupPlace(1, 3, 1, True), GroupPlace(1, 2, 2, True), GroupPlace(1, 2, 1, False)],
)
def test_a_group_that_stands_elsewhere_is_not_used(place: GroupPlace) -> None:
    attach = offered()
    attach.on_event(accepted(0), 5.0)
    commands = attach.on_event(accepted(1, place=place), 5.0)
    assert len(commands) == 1
    assert "group 1" in retry_of(commands).reason


@pytest.mark.parametrize(
    "change",
    [
        {"model_digest": "other"},
        {"is_exact": True},
        {"num_draft_tokens": 1},
        {"proposed_prompt_tokens": 512},
        {"proposes_mixed_steps": True},
    ],
)
def test_groups_that_differ_in_what_they_must_share_are_not_used(change: dict[str, Any]) -> None:
    attach = offered()
    attach.on_event(accepted(0), 5.0)
    other = accepted(1)
    commands = attach.on_event(replace(other, facts=replace(other.facts, **change)), 5.0)
    assert next(iter(change)) in retry_of(commands).reason


def test_groups_may_differ_in_their_pools_and_their_numerics() -> None:
    attach = offered()
    attach.on_event(accepted(0), 5.0)
    other = accepted(1)
    facts = replace(other.facts, num_blocks=3, numerics_fingerprint="avx2")
    assert attach.on_event(replace(other, facts=facts), 5.0) == [OpenStreams(1)]


@pytest.mark.parametrize("event", [Refused(1, 1, "", 9, "other"), StreamBroken(1, 1, 9, "other")])
def test_who_held_a_group_ends_when_another_one_holds_a_higher_epoch(event: Refused | StreamBroken) -> None:
    attach = offered() if isinstance(event, Refused) else attached()
    attach.on_event(accepted(0), 5.0)
    commands = attach.on_event(event, 5.0)
    assert isinstance(commands[-1], Exit)
    assert "other" in commands[-1].reason
    assert attach.on_event(RetryDue(), 6.0) == []


def test_who_never_held_a_group_waits_for_another_ones_end() -> None:
    attach = offered()
    attach.on_event(Refused(0, 1, "GROUP_HELD", 9, "other"), 5.0)
    assert retry_of(attach.on_event(Refused(1, 1, "GROUP_HELD", 9, "other"), 5.0)).reason == "GROUP_HELD"
    assert attach.on_event(RetryDue(), 6.0) == [Offer(0, 10), Offer(1, 10)]


def test_of_two_that_hold_parts_of_a_cell_exactly_one_ends() -> None:
    mine, other = Standing("a", held_epoch=5), Standing("b", held_epoch=5)
    assert [mine.is_below(5, "b"), other.is_below(5, "a")] == [True, False]
    mine.held_epoch = 6
    assert [mine.is_below(5, "b"), other.is_below(6, "a")] == [False, True]
    assert not mine.is_below(9, "a")
    assert not Standing("c").is_below(9, "a")
