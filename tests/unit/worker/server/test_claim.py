from __future__ import annotations

from collections.abc import Callable

import pytest

from services.worker.server.claim import ClaimLedger
from shared.errors import GroupHeldError, NotReadyError, ServiceError, StaleEpochError, StepMismatchError
from shared.network.heartbeat import LEASE_S


def claimed(epoch: int = 1, holder: str = "one", *, stream: int | None = 1) -> ClaimLedger:
    """A ledger with a holder, heard at 0.0 on `stream`; None means it has no stream yet."""
    ledger = ClaimLedger()
    ledger.offer(epoch, holder, 0.0)
    if stream is not None:
        ledger.on_heartbeat(stream, epoch, holder, 0.0)
    return ledger


def refusal(call: Callable[[], None]) -> tuple[type[ServiceError], dict[str, str]]:
    """The type and values of the error that a refused call raises."""
    with pytest.raises(ServiceError) as error_info:
        call()
    return error_info.type, error_info.value.values


def test_everything_is_refused_before_the_first_offer() -> None:
    ledger = ClaimLedger()
    assert refusal(lambda: ledger.on_heartbeat(1, 0, "", 0.0)) == (StaleEpochError, {"epoch": "0", "holder": ""})
    assert refusal(lambda: ledger.admit(1, 1, 1, 0.0))[0] is StaleEpochError
    assert refusal(lambda: ledger.check_restart(0, ""))[0] is StaleEpochError
    assert ledger.last_admitted == (0, 0)


@pytest.mark.parametrize("scheduler", ["one", "two"])
@pytest.mark.parametrize("epoch", [0, 4, 5])
def test_an_epoch_that_is_not_above_the_current_one_is_stale_and_changes_nothing(epoch: int, scheduler: str) -> None:
    ledger = claimed(5)
    assert refusal(lambda: ledger.offer(epoch, scheduler, 1.0)) == (StaleEpochError, {"epoch": "5", "holder": "one"})
    assert ledger == claimed(5)


def test_a_new_claimant_is_refused_until_the_holder_has_been_silent_for_the_lease() -> None:
    ledger = claimed(1)
    ledger.on_heartbeat(1, 1, "one", 5.0)
    held = (GroupHeldError, {"epoch": "1", "holder": "one"})
    assert refusal(lambda: ledger.offer(2, "two", 5.0 + LEASE_S)) == held
    ledger.admit(1, 1, 1, 9.0)
    assert refusal(lambda: ledger.offer(2, "two", 9.0 + LEASE_S)) == held
    ledger.offer(2, "two", 9.1 + LEASE_S)
    assert (ledger.epoch, ledger.holder) == (2, "two")
    assert refusal(lambda: ledger.on_heartbeat(1, 1, "one", 30.0)) == (StaleEpochError, {"epoch": "2", "holder": ""})


@pytest.mark.parametrize("epoch", [0, 3])
def test_a_refusal_names_a_holder_only_while_it_is_live(epoch: int) -> None:
    ledger = claimed(3)
    assert refusal(lambda: ledger.offer(epoch, "two", LEASE_S))[1] == {"epoch": "3", "holder": "one"}
    assert refusal(lambda: ledger.offer(epoch, "two", LEASE_S + 0.1))[1] == {"epoch": "3", "holder": ""}
    ledger.end_stream(1)
    assert refusal(lambda: ledger.offer(epoch, "two", 0.1))[1] == {"epoch": "3", "holder": ""}


def test_a_holder_without_a_stream_does_not_block_others() -> None:
    ledger = claimed(1, stream=None)
    ledger.offer(2, "two", 0.1)
    assert ledger.holder == "two"


def test_a_broken_stream_ends_the_claim_at_once() -> None:
    ledger = claimed(1)
    ledger.end_stream(1)
    assert not ledger.is_open
    assert refusal(lambda: ledger.admit(2, 1, 1, 0.1))[0] is StaleEpochError
    ledger.offer(2, "two", 0.1)
    assert ledger.is_open


def test_the_end_of_another_stream_ends_nothing() -> None:
    ledger = claimed(1, stream=None)
    ledger.end_stream(7)
    ledger.on_heartbeat(1, 1, "one", 0.0)
    ledger.end_stream(7)
    assert ledger.is_open
    # A stream of an older epoch may end late.
    ledger.offer(2, "one", 0.0)
    ledger.end_stream(1)
    ledger.on_heartbeat(2, 2, "one", 0.0)


def test_a_holders_own_higher_epoch_supersedes_its_open_stream() -> None:
    ledger = claimed(1)
    ledger.admit(1, 1, 1, 0.0)
    ledger.offer(2, "one", 0.1)
    assert refusal(lambda: ledger.admit(1, 1, 2, 0.2)) == (StaleEpochError, {"epoch": "2", "holder": ""})
    ledger.on_heartbeat(2, 2, "one", 0.2)
    ledger.admit(2, 2, 1, 0.2)


def test_only_the_first_stream_with_a_heartbeat_of_the_epoch_runs_its_steps() -> None:
    ledger = claimed(1, stream=None)
    assert refusal(lambda: ledger.admit(4, 1, 1, 0.0))[0] is GroupHeldError
    ledger.on_heartbeat(4, 1, "one", 0.0)
    ledger.admit(4, 1, 1, 0.0)
    for call in (lambda: ledger.admit(5, 1, 2, 0.1), lambda: ledger.on_heartbeat(5, 1, "one", 0.1)):
        assert refusal(call)[0] is GroupHeldError
    ledger.admit(4, 1, 2, 0.2)


@pytest.mark.parametrize("step_id", [0, 1, 3])
def test_step_ids_count_from_one_without_gaps(step_id: int) -> None:
    ledger = claimed(1)
    ledger.admit(1, 1, 1, 0.0)
    assert refusal(lambda: ledger.admit(1, 1, step_id, 0.0)) == (
        StepMismatchError,
        {"step_id": str(step_id), "expected": "2"},
    )
    ledger.admit(1, 1, 2, 0.0)


def test_the_last_admitted_step_is_remembered_across_epochs() -> None:
    ledger = claimed(3)
    ledger.admit(1, 3, 1, 0.0)
    ledger.admit(1, 3, 2, 0.0)
    ledger.offer(4, "one", 0.0)
    assert ledger.last_admitted == (3, 2)
    ledger.on_heartbeat(2, 4, "one", 0.0)
    ledger.admit(2, 4, 1, 0.0)
    assert ledger.last_admitted == (4, 1)


def test_only_the_holder_of_the_epoch_may_request_a_restart() -> None:
    ledger = claimed(2, "one")
    for epoch, scheduler in ((1, "one"), (3, "one"), (2, "two")):
        assert refusal(lambda: ledger.check_restart(epoch, scheduler))[0] is StaleEpochError  # noqa: B023
    ledger.check_restart(2, "one")
    # Also after its stream has ended: a stuck group has none.
    ledger.end_stream(1)
    ledger.check_restart(2, "one")


def test_a_stream_of_another_scheduler_is_refused_even_under_the_same_epoch() -> None:
    # A restarted group hands out the same numbers again.
    ledger = claimed(1, "two", stream=None)
    assert refusal(lambda: ledger.on_heartbeat(1, 1, "one", 0.0)) == (StaleEpochError, {"epoch": "1", "holder": ""})
    ledger.on_heartbeat(2, 1, "two", 0.0)


def test_a_group_that_is_leaving_keeps_its_stream_but_cannot_be_claimed() -> None:
    ledger = claimed()
    ledger.is_leaving = True
    for epoch in (0, 2):
        with pytest.raises(NotReadyError):
            ledger.offer(epoch, "one", 1.0)
    ledger.admit(1, 1, 1, 1.0)
    assert ledger.live_holder(1.0) == "one"
