"""Steps are counted by what they compute."""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.core.batch.step import StepCounts
from tests.support.scheduler.engine_driver import EngineDriver


def test_steps_are_counted_by_kind() -> None:
    counts = StepCounts()
    driver = EngineDriver()
    driver.submit(1, [1, 2], max_tokens=4)
    while driver.sent:
        batch = driver.sent[0].batch
        counts.add(batch)
        driver.step()
    counts.add(replace(batch, num_tokens=0))
    assert counts == StepCounts(prefill=1, decode=3, dummy=1)
