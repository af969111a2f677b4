"""What a group's ranks compare of a step."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.group.link import checksum
from shared.step.step import StepResult
from tests.support.worker.worker_steps import column


def result(token_ids: Sequence[int], counts: Sequence[int] | None) -> StepResult:
    return StepResult(1, 1, column(token_ids), column(), counts=None if counts is None else column(counts))


def test_ranks_that_accept_other_drafts_differ_although_their_tokens_are_the_same() -> None:
    results = [result([5, 9, 2], counts) for counts in (None, [2, 1], [1, 2], [3, 0])]
    assert len({checksum(each) for each in results}) == len(results)


def test_equal_results_have_equal_checksums() -> None:
    assert checksum(result([5, 9], [1, 1])) == checksum(result([5, 9], [1, 1]))
    assert checksum(result([5, 9], None)) != checksum(result([9, 5], None))
