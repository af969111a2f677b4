"""What is generated of the chart: `make chart`. The table of values in its README, and the names of settings.

The table is made from values.schema.json (what a value means) and values.yaml (its default); the names in the schema
are those of the settings models, without those that the chart itself gives and those that are for tests only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from services.scheduler.config import SchedulerSettings
from services.tokenizer.config import TokenizerSettings
from services.worker.config import WorkerSettings
from shared.config import ServiceSettings
from shared.settings_help import is_hidden
from tests.support.deploy.chart import CHART, Tree
from tests.support.tables.generated_tables import replace_tables

README = CHART / "README.md"
SCHEMA = CHART / "values.schema.json"
BEGIN = "<!-- Made by `make chart`: change values.schema.json and values.yaml instead. -->\n"
END = "<!-- The end of what `make chart` makes. -->\n"

_PART_TO_MODEL: dict[str, type[ServiceSettings]] = {
    "tokenizer": TokenizerSettings,
    "scheduler": SchedulerSettings,
    "workers": WorkerSettings,
}
# What the chart gives every service.
_GIVEN = frozenset(
    {
        *("listen", "insecure_bind", "manage_listen", "log_format", "drain_s"),
        *("tls_cert", "tls_key", "tls_ca", "trust_domain", "client_keys", "client_ca"),
    }
)
# What it gives one of them, or `lockstep ranks` gives each worker.
_GIVEN_TO = {
    "tokenizer": {
        *("model_dir", "model_name", "scheduler", "max_connection_age_s"),
        *("http_listen", "insecure_http_bind", "otlp_endpoint"),
    },
    "scheduler": {
        *("cell_listen", "insecure_cell_bind", "workers", "coupled"),
        *("discovery", "discovery_name", "discovery_service", "discovery_port", "max_dp"),
        *("discovery_namespace", "discovery_service_account", "discovery_api_server"),
    },
    "workers": {
        *("model_dir", "device", "device_index", "dp_rank", "dp_size", "tp_rank", "tp_size", "ep", "leader"),
    },
}


def main() -> None:
    """Bring the README and the schema up to date."""
    SCHEMA.write_text(with_settings(SCHEMA.read_text(encoding="utf-8")), encoding="utf-8")
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")


def with_settings(schema: str) -> str:
    """The schema's text with the names of settings that the services have."""
    tree = json.loads(schema)
    for part, model in _PART_TO_MODEL.items():
        shown = {name for name, field in model.model_fields.items() if not is_hidden(field)}
        names = sorted(shown - _GIVEN - _GIVEN_TO[part])
        settings = tree["definitions"][part]["properties"]["settings"]
        settings["propertyNames"] = {"enum": [name.replace("_", "-") for name in names]}
    return f"{json.dumps(tree, indent=2)}\n"


def with_table(document: str) -> str:
    """The README's text with its table of values.

    Raises:
        ValueError: it lacks the two marks.
    """
    rows = "".join(f"| `{name}` | {_show(default)} | {meaning} |\n" for name, default, meaning in leaves())
    return replace_tables(document, BEGIN, END, f"| value | default | meaning |\n|---|---|---|\n{rows}\n")


def leaves() -> Iterator[tuple[str, Any, str]]:
    """Every value of the chart with its default and its meaning, those of `cellDefaults` once."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    yield from _leaves(schema, schema["definitions"], values, "")


def _leaves(node: Tree, definitions: Tree, values: Any, path: str) -> Iterator[tuple[str, Any, str]]:
    for name, child in node["properties"].items():
        resolved = definitions[child["$ref"].rpartition("/")[2]] if "$ref" in child else child
        at = f"{path}.{name}".lstrip(".")
        if "description" in resolved:
            yield at, values[name], resolved["description"]
        elif "properties" in resolved:
            yield from _leaves(resolved, definitions, values[name], at)


def _show(default: Any) -> str:
    if default in ("", [], {}):
        return "empty"
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


if __name__ == "__main__":
    main()
