"""How a domain's attach reacts to single events; the model checker covers every order of them."""

from __future__ import annotations

from dataclasses import Field, fields, replace
from typing import Any

import pytest

from services.scheduler.cell.domains.attach import RETRY_DELAY_S, DomainAttach
from services.scheduler.cell.domains.attach_events import (
    QUESTION,
    Accepted,
    CloseStreams,
    Command,
    Dropped,
    GroupPlace,
    Offer,
    OpenStreams,
    Refused,
    Restart,
    RetryAt,
    RetryDue,
    StreamBroken,
    StreamOpened,
)
from services.scheduler.cell.domains.scheduler_claim import HEAD_START_S, OFFER_TIMEOUT_S, SchedulerClaim
from services.scheduler.cell.events import DomainAttached, DomainLost, Exit
from services.scheduler.core.policy import CellTopology
from services.scheduler.core.worker_facts import ALIKE, MAY_DIFFER, OWN, WorkerFacts
from shared.ids import DpRank
from shared.network.heartbeat import LEASE_S
from shared.wire import Introduction, introduce_self
from tests.support.scheduler.engine_driver import worker_facts

COUPLED = CellTopology(2, is_coupled=True)


def make_place(rank: int, dp_size: int = 2, tp_size: int = 1, *, is_coupled: bool = True) -> GroupPlace:
    return GroupPlace(DpRank(rank), dp_size, tp_size, is_coupled)


def accepted(group: int, epoch: int = 1, *, place: GroupPlace | None = None, **fields: Any) -> Accepted:
    return Accepted(group, epoch, worker_facts(epoch=epoch), place or make_place(group), **fields)


def newcomer(instance_id: str = "me", *, num_groups: int = 2) -> SchedulerClaim:
    """A scheduler that has never held a domain; its random draws are in the middle of their range."""
    return SchedulerClaim(instance_id, lambda: 0.5, groups=set(range(num_groups)))


def former_holder() -> SchedulerClaim:
    """A scheduler that once held a domain and holds none now."""
    claim = newcomer()
    claim.has_held = True
    return claim


def refused(group: int, epoch: int, held_epoch: int, holder: str = "") -> Refused:
    return Refused(group, epoch, "GROUP_HELD" if holder else "STALE_EPOCH", held_epoch, holder)


def free(group: int) -> Refused:
    """The answer of a freshly started group to the question."""
    return refused(group, QUESTION, 0)


def attach_alone(topology: CellTopology, place: GroupPlace) -> list[Command]:
    """What follows when the group of domain 1 accepts an offer from this place."""
    attach = DomainAttach(1, topology, former_holder())
    [offer] = attach.on_event(RetryDue(), 0.0)
    assert isinstance(offer, Offer)
    return attach.on_event(accepted(1, offer.epoch, place=place), 0.0)


ANYWHERE = GroupPlace(None, 1, 1, is_coupled=False)


@pytest.mark.parametrize("topology", [CellTopology(2), CellTopology(2, is_dynamic=True)])
def test_a_group_that_names_no_rank_fits_any_place(topology: CellTopology) -> None:
    assert attach_alone(topology, ANYWHERE) == [OpenStreams(1)]


def test_a_group_that_names_no_rank_fits_no_coupled_cell() -> None:
    attach = offered()
    attach.on_event(accepted(0), 0.0)
    [retry] = attach.on_event(accepted(1, place=ANYWHERE), 0.0)
    assert isinstance(retry, RetryAt)
    assert "expected GroupPlace(dp_rank=1, dp_size=2" in retry.reason


def test_a_discovered_group_must_not_name_a_rank() -> None:
    [retry] = attach_alone(CellTopology(2, is_dynamic=True), make_place(1, is_coupled=False))
    assert isinstance(retry, RetryAt)
    assert "expected GroupPlace(dp_rank=None" in retry.reason


def test_a_group_that_was_found_later_is_asked_before_any_is_taken() -> None:
    topology, claim = CellTopology(3, is_dynamic=True), SchedulerClaim("me", lambda: 0.5)
    first = DomainAttach(0, topology, claim)
    assert first.on_event(RetryDue(), 0.0) == [Offer(0, QUESTION)]
    # Another endpoint is found before the first one has answered.
    second = DomainAttach(1, topology, claim)
    [retry] = first.on_event(free(0), 0.0)
    assert isinstance(retry, RetryAt)
    assert retry.reason == "not every group has been asked"
    assert second.on_event(RetryDue(), 0.0) == [Offer(1, QUESTION)]
    [retry] = second.on_event(refused(1, QUESTION, 4, "leader"), 0.0)
    assert isinstance(retry, RetryAt)
    assert retry.reason == "scheduler leader holds group 1"
    # The endpoint that the leader held is gone, and with it what it said.
    second.end()
    first.on_event(RetryDue(), HEAD_START_S)
    assert first.on_event(free(0), HEAD_START_S) == [Offer(0, 1)]


def test_an_ended_attach_neither_holds_nor_answers() -> None:
    claim = former_holder()
    attach = DomainAttach(0, CellTopology(2, is_dynamic=True), claim)
    attach.on_event(RetryDue(), 0.0)
    attach.on_event(accepted(0, place=ANYWHERE), 0.0)
    assert claim.domain_to_epoch == {0: 1}
    attach.end()
    assert claim.domain_to_epoch == {}
    assert attach.on_event(StreamOpened(0, 1), 0.0) == []


def offered(claim: SchedulerClaim | None = None) -> DomainAttach:
    """Two coupled groups that were offered epoch 1 after answering the question."""
    attach = DomainAttach(0, COUPLED, claim or newcomer())
    assert attach.on_event(RetryDue(), 0.0) == [Offer(0, QUESTION), Offer(1, QUESTION)]
    assert attach.on_event(free(1), 0.0) == []
    assert attach.on_event(free(0), 0.0) == [Offer(0, 1), Offer(1, 1)]
    return attach


def opening() -> DomainAttach:
    """Both groups have accepted the offer."""
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
    """The last command, which schedules another round after the delay."""
    retry = commands[-1]
    assert isinstance(retry, RetryAt)
    assert retry.when == 5.0 + RETRY_DELAY_S
    return retry


def retry_reason(commands: list[Command]) -> str:
    """Why the only command schedules another round."""
    [retry] = commands
    assert isinstance(retry, RetryAt)
    return retry.reason


def test_a_domain_is_attached_when_every_group_opens_its_stream() -> None:
    attached()


def test_a_lost_domain_is_reported_once_and_offered_the_next_epoch() -> None:
    attach = attached()
    commands = attach.on_event(StreamBroken(1, 1), 5.0)
    assert commands[:-1] == [CloseStreams(1), DomainLost(0, 1)]
    assert "group 1" in retry_of(commands).reason
    assert attach.on_event(StreamBroken(0, 1), 5.1) == []
    assert attach.on_event(RetryDue(), 5.5) == [Offer(0, 2), Offer(1, 2)]


def test_nothing_is_attached_if_a_stream_breaks_before_all_are_open() -> None:
    attach = opening()
    attach.on_event(StreamOpened(0, 1), 0.0)
    assert [type(command) for command in attach.on_event(StreamBroken(1, 1), 5.0)] == [CloseStreams, RetryAt]
    assert attach.on_event(StreamOpened(1, 1), 5.0) == []


def test_an_epoch_that_the_engine_drops_is_closed_and_not_reported_back() -> None:
    attach = attached()
    assert attach.on_event(Dropped(2), 5.0) == []
    assert [type(command) for command in attach.on_event(Dropped(1), 5.0)] == [CloseStreams, RetryAt]


def test_the_next_round_waits_for_all_answers_and_exceeds_the_highest_epoch() -> None:
    attach = attached()
    retry_of(attach.on_event(Dropped(1), 5.0))
    attach.on_event(RetryDue(), 5.5)
    assert attach.on_event(refused(1, 2, 41), 5.0) == []
    retry = retry_of(attach.on_event(accepted(0, 2), 5.0))
    assert retry.reason == "STALE_EPOCH"
    assert attach.on_event(RetryDue(), 5.5) == [Offer(0, 42), Offer(1, 42)]


def test_an_epoch_that_every_group_refused_is_offered_again() -> None:
    attach = DomainAttach(0, COUPLED, former_holder())
    for _ in range(3):
        assert attach.on_event(RetryDue(), 5.0) == [Offer(0, 1), Offer(1, 1)]
        attach.on_event(refused(0, 1, 0), 5.0)
        retry_of(attach.on_event(refused(1, 1, 0), 5.0))


def test_answers_of_an_earlier_round_are_ignored() -> None:
    attach = DomainAttach(0, COUPLED, former_holder())
    attach.on_event(RetryDue(), 0.0)
    attach.on_event(Refused(0, 1, "no answer"), 0.0)
    attach.on_event(Refused(1, 1, "no answer"), 0.0)
    assert attach.on_event(RetryDue(), 0.5) == [Offer(0, 2), Offer(1, 2)]
    for group in range(2):
        assert attach.on_event(accepted(group), 0.6) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"is_stuck": True}, "stuck"), ({"last_step": (1, 8)}, "differ")],
)
def test_groups_that_cannot_run_together_are_restarted(changes: dict[str, Any], reason: str) -> None:
    attach = offered()
    attach.on_event(accepted(0, last_step=(1, 9)), 5.0)
    commands = attach.on_event(accepted(1, **{"last_step": (1, 9), **changes}), 5.0)
    assert commands[:-1] == [Restart(0, 1), Restart(1, 1)]
    assert reason in retry_of(commands).reason


def test_a_stuck_group_is_restarted_though_its_partner_is_gone() -> None:
    attach = offered()
    attach.on_event(Refused(0, 1, "UNAVAILABLE"), 5.0)
    assert attach.on_event(accepted(1, is_stuck=True), 5.0)[:-1] == [Restart(1, 1)]


def test_uncoupled_groups_are_attached_independently() -> None:
    attach = DomainAttach(1, CellTopology(2), former_holder())
    assert attach.on_event(RetryDue(), 0.0) == [Offer(1, 1)]
    answer = accepted(1, place=make_place(1, is_coupled=False), last_step=(7, 7))
    assert attach.on_event(answer, 0.0) == [OpenStreams(1)]
    assert attach.on_event(StreamOpened(1, 1), 0.0) == [DomainAttached(1, (answer.facts,))]


@pytest.mark.parametrize(
    "place",
    [make_place(0), make_place(1, dp_size=3), make_place(1, tp_size=2), make_place(1, is_coupled=False)],
)
def test_a_group_with_the_wrong_layout_is_not_used(place: GroupPlace) -> None:
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
        {"introduction": replace(introduce_self(), release="0.0.1")},
    ],
)
def test_groups_that_differ_in_what_they_must_share_are_not_used(change: dict[str, Any]) -> None:
    attach = offered()
    attach.on_event(accepted(0), 5.0)
    other = accepted(1)
    commands = attach.on_event(replace(other, facts=replace(other.facts, **change)), 5.0)
    assert next(iter(change)) in retry_of(commands).reason


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_group_with_another_context_is_refused_by_name_whichever_answers_first(order: tuple[int, int]) -> None:
    attach = offered()
    answers = [accepted(0), accepted(1)]
    answers[1] = replace(answers[1], facts=replace(answers[1].facts, context_length=4096, num_blocks=9))
    context = answers[0].facts.context_length
    for group in order:
        commands = attach.on_event(answers[group], 5.0)
    assert retry_of(commands).reason == (
        f"group 1 serves a context of 4096 tokens, group 0 one of {context}: all need the same --max-model-len"
    )


def test_a_scheduler_has_its_first_start_until_it_has_held_a_group() -> None:
    attach, second = offered(), DomainAttach(0, CellTopology(1), former_holder())
    assert (attach.is_first_start, second.is_first_start) == (True, False)
    for event in (accepted(0), accepted(1), StreamOpened(0, 1)):
        attach.on_event(event, 5.0)
    assert attach.is_first_start
    attach.on_event(StreamOpened(1, 1), 5.0)
    assert not attach.is_first_start


def test_groups_may_differ_in_pool_size_numerics_and_graphs() -> None:
    attach = offered()
    attach.on_event(accepted(0), 5.0)
    other = accepted(1)
    facts = replace(other.facts, num_blocks=3, start_s=9.5, numerics_fingerprint="avx2", graph_batch_sizes=(1, 2))
    assert attach.on_event(replace(other, facts=facts), 5.0) == [OpenStreams(1)]


@pytest.mark.parametrize("field", fields(WorkerFacts), ids=lambda each: each.name)
def test_every_fact_is_marked_and_groups_that_differ_are_treated_by_its_mark(field: Field[object]) -> None:
    assert field.metadata in (ALIKE, OWN), "whether groups of one domain may differ in it"
    attach = offered()
    attach.on_event(accepted(0), 5.0)
    other = accepted(1)
    changed: dict[str, Any] = {field.name: other_value(getattr(other.facts, field.name))}
    answers = attach.on_event(replace(other, facts=replace(other.facts, **changed)), 5.0)
    if field.metadata[MAY_DIFFER]:
        assert answers == [OpenStreams(1)]
    else:
        # A context is what operators set, and has both numbers.
        is_context = field.name == "context_length"
        words = "group 1 serves a context of" if is_context else f"{field.name} of group 1 differs"
        assert words in retry_of(answers).reason


def other_value(value: object) -> object:
    """Another value of the same type."""
    if isinstance(value, Introduction):
        return replace(value, release=f"{value.release}x")
    if isinstance(value, bool):
        return not value
    if value is None or isinstance(value, int):
        return (value or 0) + 1
    assert isinstance(value, str | bytes | tuple)
    return {str: "other", bytes: b"other", tuple: (7, 9)}[type(value)]


@pytest.mark.parametrize(("drawn", "delay_s"), [(0.0, 0.5 * RETRY_DELAY_S), (1.0, 1.5 * RETRY_DELAY_S)])
def test_rounds_begin_after_random_delays(drawn: float, delay_s: float) -> None:
    attach = DomainAttach(0, COUPLED, SchedulerClaim("me", lambda: drawn))
    attach.on_event(RetryDue(), 0.0)
    attach.on_event(refused(0, QUESTION, 3, "other"), 5.0)
    [retry] = attach.on_event(free(1), 5.0)
    assert isinstance(retry, RetryAt)
    assert retry.when == 5.0 + delay_s


def test_a_newcomer_asks_until_no_group_names_a_live_holder_and_then_offers_the_next_epoch() -> None:
    attach = DomainAttach(0, COUPLED, newcomer())
    for _ in range(3):
        assert attach.on_event(RetryDue(), 5.0) == [Offer(0, QUESTION), Offer(1, QUESTION)]
        attach.on_event(refused(0, QUESTION, 7, "other"), 5.0)
        assert "other" in retry_of(attach.on_event(Refused(1, QUESTION, "UNAVAILABLE"), 5.0)).reason
    attach.on_event(RetryDue(), 5.0)
    attach.on_event(refused(0, QUESTION, 7), 5.0)
    assert attach.on_event(refused(1, QUESTION, 6), 5.0) == [Offer(0, 8), Offer(1, 8)]


def standby() -> DomainAttach:
    """Both groups have named another scheduler as their live holder."""
    attach = DomainAttach(0, COUPLED, newcomer())
    ask(attach, refused(0, QUESTION, 7, "other"), refused(1, QUESTION, 7, "other"), 0.0)
    return attach


def ask(attach: DomainAttach, first: Refused, second: Refused, now: float) -> list[Command]:
    """The commands of a round in which the groups give these answers to the question."""
    assert attach.on_event(RetryDue(), now) == [Offer(0, QUESTION), Offer(1, QUESTION)]
    assert attach.on_event(first, now) == []
    return attach.on_event(second, now)


def test_a_standby_leaves_groups_that_have_just_started_to_their_former_holder_for_a_while() -> None:
    attach = standby()
    loading = [Refused(group, QUESTION, "NOT_READY", 0, is_ready=False) for group in (0, 1)]
    # The head start begins when the last group is ready, however long that takes.
    for now_s, first in [(0.0, loading[0]), (100.0, free(0)), (200.0, free(0))]:
        assert "not ready" in retry_reason(ask(attach, first, loading[1], now_s))
    for now_s in (1000.0, 1000.0 + 0.9 * HEAD_START_S):
        assert "just started" in retry_reason(ask(attach, free(0), free(1), now_s))
    assert ask(attach, free(0), free(1), 1000.0 + HEAD_START_S) == [Offer(0, 8), Offer(1, 8)]


def test_a_standby_leaves_groups_whose_former_holder_is_taking_them_for_a_while() -> None:
    attach = standby()
    assert "just started" in retry_reason(ask(attach, free(0), free(1), 10.0))
    # It has offered them its next epoch, and prepares its first steps: no stream says yet that it holds them.
    for now_s in (12.0, 12.0 + OFFER_TIMEOUT_S):
        assert "offered" in retry_reason(ask(attach, refused(0, QUESTION, 8), refused(1, QUESTION, 8), now_s))
    # Then its streams are open, and then they end.
    held = [refused(group, QUESTION, 8, "other") for group in (0, 1)]
    assert "other" in retry_reason(ask(attach, held[0], held[1], 12.5 + OFFER_TIMEOUT_S))
    free_again = [refused(group, QUESTION, 8) for group in (0, 1)]
    assert ask(attach, free_again[0], free_again[1], 13.0 + OFFER_TIMEOUT_S) == [Offer(0, 9), Offer(1, 9)]


def test_a_standby_leaves_groups_that_take_minutes_to_prepare_to_the_scheduler_that_offers_them_epochs() -> None:
    attach = standby()
    ask(attach, free(0), free(1), 10.0)
    # Each offer ends without an answer, and the next one is a retry later; the standby asks shortly before it.
    for epoch, now_s in [(8 + number, 10.5 + number * (OFFER_TIMEOUT_S + RETRY_DELAY_S)) for number in range(8)]:
        for later_s in (0.0, OFFER_TIMEOUT_S):
            answers = [refused(group, QUESTION, epoch) for group in (0, 1)]
            assert "offered" in retry_reason(ask(attach, answers[0], answers[1], now_s + later_s))
    # Its scheduler is lost: no further offer follows.
    assert ask(attach, answers[0], answers[1], now_s + OFFER_TIMEOUT_S + HEAD_START_S) == [Offer(0, 16), Offer(1, 16)]


def test_a_standby_takes_groups_at_once_when_the_stream_of_their_holder_has_ended() -> None:
    assert ask(standby(), refused(0, QUESTION, 7), refused(1, QUESTION, 7), 0.5) == [Offer(0, 8), Offer(1, 8)]


def test_a_standby_does_not_offer_an_epoch_to_half_a_domain() -> None:
    attach = standby()
    assert "not ready" in retry_reason(ask(attach, refused(0, QUESTION, 7), Refused(1, QUESTION, "UNAVAILABLE"), 9.0))


def test_a_newcomer_asks_all_groups_of_the_cell_before_it_offers_any() -> None:
    claim = newcomer()
    first, second = (DomainAttach(domain, CellTopology(2), claim) for domain in range(2))
    first.on_event(RetryDue(), 5.0)
    assert retry_of(first.on_event(free(0), 5.0)).reason == "not every group has been asked"
    second.on_event(RetryDue(), 5.0)
    assert "other" in retry_of(second.on_event(refused(1, QUESTION, 6, "other"), 5.0)).reason
    first.on_event(RetryDue(), 5.0)
    assert "other" in retry_of(first.on_event(free(0), 5.0)).reason


def test_a_scheduler_that_has_held_a_domain_offers_the_others_at_once() -> None:
    claim = newcomer()
    first, second = (DomainAttach(domain, CellTopology(2), claim) for domain in range(2))
    for domain in (first, second):
        domain.on_event(RetryDue(), 5.0)
    first.on_event(free(0), 5.0)
    assert second.on_event(free(1), 5.0) == [Offer(1, 1)]
    second.on_event(accepted(1, place=make_place(1, is_coupled=False)), 5.0)
    second.on_event(StreamOpened(1, 1), 5.0)
    assert first.on_event(RetryDue(), 5.5) == [Offer(0, 1)]


def refuse_until(attach: DomainAttach, times: list[float], refusal: Refused) -> list[Command]:
    """Run rounds at these times, each refused by a group for a live rival; returns the last commands."""
    for now in times:
        assert attach.on_event(RetryDue(), now) == [Offer(0, refusal.epoch)]
        commands = attach.on_event(refusal, now)
    return commands


def test_a_former_holder_exits_after_two_refusals_a_lease_apart_for_the_same_live_rival() -> None:
    attach = DomainAttach(0, CellTopology(1), former_holder())
    attach.on_event(RetryDue(), 0.0)
    attach.on_event(refused(0, 1, 9, "other"), 0.0)
    refusal = refused(0, 10, 9, "other")
    assert isinstance(refuse_until(attach, [5.0, LEASE_S], refusal)[-1], RetryAt)
    [command] = refuse_until(attach, [LEASE_S + 0.1], refusal)
    assert command == Exit("scheduler other holds the workers of domain 0")
    assert attach.on_event(RetryDue(), 30.0) == []


def test_a_stream_cut_by_a_rival_counts_as_the_first_refusal_but_not_the_last() -> None:
    attach = attached()
    retry_of(attach.on_event(StreamBroken(1, 1, 9, "other"), 5.0))
    assert attach.on_event(RetryDue(), 5.5) == [Offer(0, 10), Offer(1, 10)]
    retry_of([*attach.on_event(refused(1, 10, 9, "other"), 5.0), *attach.on_event(refused(0, 10, 0), 5.0)])
    attach.on_event(RetryDue(), 5.1 + LEASE_S)
    assert isinstance(attach.on_event(refused(1, 10, 9, "other"), 5.1 + LEASE_S)[0], Exit)


@pytest.mark.parametrize("between", [refused(0, 10, 9), refused(0, 10, 9, "third"), Refused(0, 10, "no answer")])
def test_refusals_count_from_the_last_answer_that_named_another_holder_or_none(between: Refused) -> None:
    attach = DomainAttach(0, CellTopology(1), former_holder())
    attach.on_event(RetryDue(), 0.0)
    attach.on_event(refused(0, 1, 9, "other"), 0.0)
    attach.on_event(RetryDue(), 5.0)
    attach.on_event(between, 5.0)
    commands = attach.on_event(RetryDue(), 5.0 + LEASE_S)
    assert isinstance(commands[0], Offer)
    last = refused(0, commands[0].epoch, 9, "other")
    assert isinstance(attach.on_event(last, 5.0 + LEASE_S)[-1], RetryAt)


def test_an_answer_that_was_delayed_past_the_lease_is_no_second_refusal() -> None:
    attach = DomainAttach(0, CellTopology(1), former_holder())
    attach.on_event(RetryDue(), 0.0)
    attach.on_event(refused(0, 1, 9, "other"), 0.0)
    attach.on_event(RetryDue(), 1.0)
    retry = attach.on_event(refused(0, 10, 9, "other"), LEASE_S + 4.0)
    assert isinstance(retry[-1], RetryAt)


def test_exactly_one_of_two_schedulers_that_hold_parts_of_a_cell_exits() -> None:
    mine, other = newcomer("a"), newcomer("b")
    for claim in (mine, other):
        claim.has_held = True
        claim.domain_to_epoch = {3: 5}
    assert [mine.is_below(5, "b"), other.is_below(5, "a")] == [True, False]
    mine.domain_to_epoch[4] = 6
    assert [mine.is_below(5, "b"), other.is_below(6, "a")] == [False, True]
    assert not newcomer("c").is_below(9, "a")
