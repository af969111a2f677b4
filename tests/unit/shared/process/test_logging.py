"""The format of log records."""

from __future__ import annotations

import json
import logging
import sys

from shared.process.logging import JsonFormatter, TextFormatter


def make_record(**fields: object) -> logging.LogRecord:
    record = logging.LogRecord("shared.x", logging.INFO, __file__, 1, "request %s", ("finished",), None)
    vars(record).update(fields)
    return record


def test_a_text_record_is_one_line_followed_by_its_fields() -> None:
    line = TextFormatter("scheduler").format(make_record(request_id="r1", num_tokens=3))

    assert line.endswith(" INFO scheduler: request finished request_id=r1 num_tokens=3")
    assert "\n" not in line


def test_a_json_record_is_one_object_with_its_fields() -> None:
    line = JsonFormatter("scheduler").format(make_record(request_id="r1", num_tokens=3))

    entry = json.loads(line)
    assert entry.pop("time") > 0
    assert entry == {
        "level": "INFO",
        "service": "scheduler",
        "message": "request finished",
        "request_id": "r1",
        "num_tokens": 3,
    }
    assert "\n" not in line


def test_a_json_record_of_an_error_is_still_one_line() -> None:
    record = make_record()
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        record.exc_info = sys.exc_info()

    line = JsonFormatter("scheduler").format(record)

    assert "RuntimeError: broken" in json.loads(line)["traceback"]
    assert "\n" not in line


def test_a_field_that_is_not_json_serializable_is_written_as_text() -> None:
    line = JsonFormatter("scheduler").format(make_record(error=ValueError("odd")))

    assert json.loads(line)["error"] == "odd"
