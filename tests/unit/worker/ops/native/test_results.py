"""Where results are while a capture records calls."""

from __future__ import annotations

import torch

from services.worker.ops.native.results import Renewable, Results


class Plan:
    """See `Renewable`."""

    def renew(self) -> None:
        """Nothing."""


def test_results_and_plans_are_kept_only_in_the_body() -> None:
    results, kept, plans = Results(), torch.ones(2, 2), list[Renewable]()
    first, second, third = Plan(), Plan(), Plan()
    results.add_plan(first)
    with results.kept(lambda *_, dtype: kept.to(dtype), plans):
        results.add_plan(second)
        assert results.empty(2, 2, dtype=torch.float32) is kept
    results.add_plan(third)
    assert plans == [second]
    assert results.empty(2, 2, dtype=torch.float32) is not kept
