"""When exactness is promised, what ends when it no longer is, and what clients learn about recoveries."""

from __future__ import annotations

import pytest

from services.scheduler.cell.events import ChoiceSoFar, ClientMessage, Submission
from services.scheduler.core.policy import CellTopology, SchedulerPolicy
from services.scheduler.core.results.outputs import RequestEnd
from shared.ids import RequestHandle
from shared.request.sampling_params import SamplingParams
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.engine_driver import EngineDriver, token_bytes

PROMPT = list(range(100, 120))
EXACT = {"is_exact": True, "numerics_fingerprint": "a"}
OTHER_EXACT = {"is_exact": True, "numerics_fingerprint": "b"}
ORDINARY = {"is_exact": False, "numerics_fingerprint": "a"}
TWO_RANKS = CellTopology(dp_size=2)


def end_of(driver: EngineDriver, handle: int) -> RequestEnd:
    end = driver.choices[1, handle].end
    assert end is not None
    return end


def reason_of(driver: EngineDriver, handle: int) -> str | None:
    output = driver.choices.get((1, handle))
    return output.end.error.reason if output and output.end and output.end.error else None


def make_driver(*ranks: dict[str, object], topology: CellTopology = TWO_RANKS, **changes: object) -> EngineDriver:
    """A cell whose first ranks are attached with these facts."""
    driver = EngineDriver(topology=topology, attach=False, **changes)  # type: ignore[arg-type]
    for domain, facts in enumerate(ranks):
        driver.attach(domain, **facts)
    return driver


@pytest.mark.parametrize(
    ("ranks", "fingerprint"),
    [
        ([EXACT], "a"),
        ([EXACT, EXACT], "a"),
        ([ORDINARY], ""),
        ([EXACT, ORDINARY], ""),
        ([EXACT, OTHER_EXACT], ""),
    ],
)
def test_exactness_is_promised_when_all_attached_ranks_share_an_exact_fingerprint(
    ranks: list[dict[str, object]], fingerprint: str
) -> None:
    driver = make_driver(*ranks)
    assert driver.engine.facts.exact_fingerprint == fingerprint
    driver.submit(1, PROMPT, max_tokens=3, is_exact=True)
    driver.submit(2, PROMPT, max_tokens=3)
    driver.run()
    assert reason_of(driver, 1) == (None if fingerprint else "EXACT_UNAVAILABLE")
    assert reason_of(driver, 2) is None


def test_when_a_rank_with_other_numerics_attaches_queued_exact_requests_end_and_running_ones_continue() -> None:
    driver = make_driver(EXACT, policy=SchedulerPolicy(max_num_seqs=1))
    for handle in (1, 2):
        driver.submit(handle, PROMPT, max_tokens=4, is_exact=True)
    driver.submit(3, PROMPT, max_tokens=4)
    driver.attach(1, **OTHER_EXACT)
    assert [reason_of(driver, handle) for handle in (1, 2, 3)] == [None, "EXACT_UNAVAILABLE", None]
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(PROMPT, 0, 4)
    assert driver.choices[1, 3].tokens == expected_completion(PROMPT, 0, 4)


def test_an_exact_request_of_a_lost_rank_does_not_continue_under_other_numerics() -> None:
    driver = make_driver(EXACT, OTHER_EXACT)
    driver.lose(1)
    driver.submit(1, PROMPT, max_tokens=9, is_exact=True)
    driver.step(0)
    driver.attach(1, **OTHER_EXACT)
    assert reason_of(driver, 1) is None
    driver.lose(0)
    assert reason_of(driver, 1) == "EXACT_UNAVAILABLE"


def test_exactness_survives_a_worker_that_returns_with_the_same_numerics() -> None:
    driver = make_driver(EXACT, topology=CellTopology())
    driver.submit(1, PROMPT, max_tokens=9, is_exact=True)
    driver.step()
    driver.lose()
    # Until another worker attaches, it is promised as before.
    assert driver.engine.facts.exact_fingerprint == "a"
    driver.attach(0, **EXACT)
    driver.run()
    end = end_of(driver, 1)
    assert (end.error, end.num_resumes, end.is_resume_exact) == (None, 1, True)


def test_a_resubmission_before_the_first_rank_is_checked_when_it_attaches() -> None:
    driver = make_driver(topology=CellTopology())
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    submissions = [
        Submission(handle, f"r{handle}", token_bytes(PROMPT), params, attempt=2, is_exact=handle == 1)
        for handle in (RequestHandle(1), RequestHandle(2))
    ]
    driver.on_event(ClientMessage(1, submissions))
    driver.attach(0, **ORDINARY)
    driver.run()
    assert [reason_of(driver, handle) for handle in (1, 2)] == ["EXACT_UNAVAILABLE", None]


@pytest.mark.parametrize(
    ("first", "second", "is_resume_exact"),
    [(EXACT, EXACT, True), (EXACT, OTHER_EXACT, False), (ORDINARY, ORDINARY, False), (EXACT, ORDINARY, False)],
)
def test_an_end_reports_how_often_a_choice_was_resumed_and_whether_exactly(
    first: dict[str, object], second: dict[str, object], is_resume_exact: bool
) -> None:
    driver = make_driver(first, topology=CellTopology(), policy=SchedulerPolicy(max_num_seqs=1))
    driver.submit(1, PROMPT, max_tokens=9)
    driver.submit(2, PROMPT, max_tokens=9)
    driver.step()
    driver.lose()
    driver.attach(0, **second)
    driver.run()
    end, other = end_of(driver, 1), end_of(driver, 2)
    assert (end.num_resumes, end.is_resume_exact) == (1, is_resume_exact)
    # It was only waiting.
    assert (other.num_resumes, other.is_resume_exact) == (0, True)


def test_a_choice_that_stops_while_waiting_for_a_rank_counts_as_resumed_exactly() -> None:
    driver = make_driver(EXACT, topology=CellTopology())
    driver.submit(1, PROMPT, max_tokens=20)
    for _ in range(3):
        driver.step()
    driver.lose()
    driver.stop_at(1, 2)
    assert (end_of(driver, 1).num_resumes, end_of(driver, 1).is_resume_exact) == (1, True)


def test_recoveries_under_earlier_attempts_count() -> None:
    driver = make_driver(EXACT, topology=CellTopology())
    output = expected_completion(PROMPT, 0, 6)[:2]
    submission = Submission(
        RequestHandle(1),
        "r",
        token_bytes(PROMPT),
        SamplingParams(max_tokens=6, ignore_eos=True),
        attempt=2,
        choices_so_far=(ChoiceSoFar(token_bytes(output)),),
        num_earlier_resumes=3,
    )
    driver.resume(1, submission, output)
    driver.step()
    driver.lose()
    driver.attach(0, **EXACT)
    driver.run()
    assert end_of(driver, 1).num_resumes == 4


def test_a_recovery_lasts_until_every_lost_sequence_has_another_token_or_an_end() -> None:
    driver = make_driver(EXACT, topology=CellTopology(), depth=2)
    for handle in (1, 2, 3):
        driver.submit(handle, [handle, *PROMPT], max_tokens=9)
    for _ in range(4):
        driver.step()
    num_tokens = len(driver.choices[1, 2].tokens)
    lost_at = driver.now
    driver.lose()
    counters = driver.engine.state().counters
    driver.now += 2.0
    driver.attach(0, **EXACT)
    driver.abort(3)
    while not counters.num_recoveries:
        assert len(driver.choices[1, 2].tokens) == num_tokens
        driver.step()
    assert counters.recovery_s == pytest.approx(driver.now - lost_at)
    assert sum(counters.recoveries_by_s) == 1
    assert len(driver.choices[1, 2].tokens) == num_tokens + 1
    driver.run()
    assert counters.num_recoveries == 1
