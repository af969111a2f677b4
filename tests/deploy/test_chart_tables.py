"""What is generated of the chart is up to date."""

from __future__ import annotations

import json

from tests.support.deploy.chart import CHART
from tests.support.deploy.chart_tables import README, SCHEMA, leaves, with_settings, with_table


def test_the_table_of_values_is_up_to_date() -> None:
    document = README.read_text(encoding="utf-8")
    assert with_table(document) == document, "run `make chart`"


def test_the_names_of_settings_are_up_to_date() -> None:
    schema = SCHEMA.read_text(encoding="utf-8")
    assert with_settings(schema) == schema, "run `make chart`"


def test_what_the_chart_gives_is_no_setting_of_its_users() -> None:
    definitions = json.loads(SCHEMA.read_text(encoding="utf-8"))["definitions"]
    for part, known in {"tokenizer": "log-level", "scheduler": "max-num-seqs", "workers": "kv-cache-dtype"}.items():
        names = definitions[part]["properties"]["settings"]["propertyNames"]["enum"]
        assert known in names
        assert not {"listen", "manage-listen", "tls-key", "drain-s"} & set(names)


def test_each_value_says_what_it_means_and_each_default_is_in_the_schema() -> None:
    for name, _, meaning in leaves():
        assert meaning.endswith("."), name


def test_each_example_is_named_in_the_readme() -> None:
    document = README.read_text(encoding="utf-8")
    assert [path.name for path in (CHART / "examples").iterdir() if f"(examples/{path.name})" not in document] == []
