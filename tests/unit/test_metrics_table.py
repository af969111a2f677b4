"""The tables of services/METRICS.md match what the services serve."""

from __future__ import annotations

import pytest

from tests.support.tables.metrics_table import BEGIN, END, METRICS_FILE, render_tables, with_tables


async def test_the_document_is_up_to_date() -> None:
    document = METRICS_FILE.read_text(encoding="utf-8")
    assert with_tables(document, await render_tables()) == document, "run `make metrics`"


async def test_every_metric_has_a_meaning_and_its_unit_and_labels() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in (await render_tables()).splitlines()]
    metrics = {row[0]: row[1:] for row in rows if row[0].startswith("`lockstep_")}
    assert [name for name, row in metrics.items() if not row[3]] == []
    assert metrics["`lockstep_kv_cache_usage_perc`"][:3] == ["gauge", "ratio", ""]
    assert metrics["`lockstep_rank_kv_cache_usage_perc`"][:3] == ["gauge", "ratio", "`rank`"]
    assert metrics["`lockstep_step_device_time_seconds`"][:3] == ["histogram", "seconds", "`kind`"]
    assert metrics["`lockstep_request_success_total`"][:3] == ["counter", "", "`finished_reason`"]


@pytest.mark.parametrize("document", ["", BEGIN, END, END + BEGIN, BEGIN + END + BEGIN + END])
def test_a_document_without_the_marks_is_refused(document: str) -> None:
    with pytest.raises(ValueError, match="marks"):
        with_tables(document, "")
