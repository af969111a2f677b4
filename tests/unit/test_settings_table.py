"""The tables of services/SETTINGS.md match the services' settings models."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile

import pytest

from tests.support.system.processes import ROOT, module_environment
from tests.support.tables.settings_table import (
    BEGIN,
    END,
    FLAGS_FILE,
    SETTINGS_FILE,
    render_flags,
    render_tables,
    with_tables,
)

pytestmark = pytest.mark.process

# Writing the tables needs no torch and must not wait for its import.
CHECK_IMPORTS = (
    "import sys, tests.support.tables.settings_table; print('torch' in sys.modules, 'transformers' in sys.modules)"
)

# The settings of each beside those of all, which come last; those for tests are not counted.
NUM_SETTINGS = {
    "`lockstep serve`": 31,
    "`lockstep ranks`": 22,
    "Tokenizer": 30,
    "Scheduler": 41,
    "Worker": 38,
    "Every service": 8,
}


def rows_of(title: str) -> Iterator[list[str]]:
    """The cells of the table below a title."""
    _, _, rest = render_tables().partition(f"**{title}")
    for line in takewhile(bool, rest.splitlines()[4:]):
        yield [cell.strip() for cell in line.strip("|").split("|")]


def test_the_document_is_up_to_date() -> None:
    document = SETTINGS_FILE.read_text(encoding="utf-8")
    assert with_tables(document) == document, "run `make settings`"


def test_the_launcher_knows_the_services_flags() -> None:
    assert FLAGS_FILE.read_text(encoding="utf-8") == render_flags(), "run `make settings`"


def test_a_setting_is_listed_under_its_service_with_default_and_choices() -> None:
    worker = {row[0]: row[1:] for row in rows_of("Worker")}
    assert worker["`--ops-backend`"][0] == "`auto`"
    choices = "One of `auto`, `aiter`, `native`, `reference`, `triton`, `triton-exact`."
    assert worker["`--ops-backend`"][1].endswith(choices)
    assert worker["`--model-dir`"][0] == "required"
    assert worker["`--kv-cache-num-blocks`"][0] == "not set"
    assert next(iter(rows_of("`lockstep serve`")))[0] == "`MODEL_DIR`"
    assert {row[0]: row[1] for row in rows_of("Scheduler")}["`--enable-prefix-caching`"] == "on"


def test_settings_of_all_services_are_listed_once() -> None:
    assert render_tables().count("`--log-level`") == 1
    assert render_tables().count("`--listen`") == 5


def test_no_setting_is_added_in_passing() -> None:
    assert {title: len(list(rows_of(title))) for title in NUM_SETTINGS} == NUM_SETTINGS, (
        "a new setting needs its reason in the commit: who sets it to what, and why no default fits everybody"
    )


def test_text_around_the_tables_is_kept_and_outdated_tables_are_replaced() -> None:
    assert with_tables(f"before\n{BEGIN}| old |\n{END}after\n") == f"before\n{BEGIN}\n{render_tables()}{END}after\n"


@pytest.mark.parametrize("document", ["", BEGIN, END, END + BEGIN, BEGIN + END + BEGIN + END])
def test_a_document_without_the_marks_is_refused(document: str) -> None:
    with pytest.raises(ValueError, match="marks"):
        with_tables(document)


def test_the_settings_models_import_no_torch() -> None:
    command = [sys.executable, "-c", CHECK_IMPORTS]
    result = subprocess.run(command, cwd=ROOT, env=module_environment(), capture_output=True, text=True, check=True)
    assert result.stdout == "False False\n"
