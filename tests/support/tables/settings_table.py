"""The tables of services/SETTINGS.md, generated from the settings models: `make settings`.

The module is part of the tests because only they may import every service.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from services.cli.ranks_settings import RanksSettings
from services.cli.serve_settings import ServeSettings
from services.scheduler.config import SchedulerSettings
from services.tokenizer.config import TokenizerSettings
from services.worker.config import WorkerSettings
from shared.config import ServiceSettings
from shared.settings_help import is_hidden, is_positional
from tests.support.system.processes import ROOT
from tests.support.tables.generated_tables import replace_tables

SETTINGS_FILE = ROOT / "services" / "SETTINGS.md"
FLAGS_FILE = ROOT / "services" / "cli" / "processes" / "service_flags.py"
_FLAGS_HEAD = '''"""The services' flags, by role.

Made by `make settings`: change the models in services/*/config.py instead.
"""

from __future__ import annotations

ROLE_TO_FLAGS: dict[str, tuple[str, ...]] = {'''
BEGIN = "<!-- Made by `make settings`: change the models in services/*/config.py instead. -->\n"
END = "<!-- The end of what `make settings` makes. -->\n"

_TITLE_TO_MODEL: dict[str, type[ServiceSettings]] = {
    "`lockstep serve`": ServeSettings,
    "`lockstep ranks`": RanksSettings,
    "Tokenizer": TokenizerSettings,
    "Scheduler": SchedulerSettings,
    "Worker": WorkerSettings,
}
# What every service has, with one meaning. `listen` is not among them: each has its own default.
_SHARED_NAMES = tuple(name for name in ServiceSettings.model_fields if name != "listen")


def main() -> None:
    """Bring services/SETTINGS.md and the launcher's list of the services' flags up to date."""
    FLAGS_FILE.write_text(render_flags(), encoding="utf-8")
    SETTINGS_FILE.write_text(with_tables(SETTINGS_FILE.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(document: str) -> str:
    """The document's text with its tables replaced by those of the settings models.

    Raises:
        ValueError: the text does not have the two marks, once each and in order.
    """
    return replace_tables(document, BEGIN, END, render_tables())


def render_flags() -> str:
    """The module with the services' flags, which a launcher cannot import."""
    lines = [_FLAGS_HEAD]
    for role in ("worker", "scheduler", "tokenizer"):
        model = _TITLE_TO_MODEL[role.capitalize()]
        lines.append(f'    "{role}": (')
        for name, field in model.model_fields.items():
            if not is_hidden(field):
                flag = name.replace("_", "-")
                forms = [flag, f"no-{flag}"] if field.annotation is bool else [flag]
                lines += [f'        "{form}",' for form in forms]
        lines.append("    ),")
    return "\n".join([*lines, "}\n"])


def render_tables() -> str:
    """One table of what all services share, then one for each with its own."""
    parts = [_table("Every service, `lockstep serve` and `lockstep ranks`", ServiceSettings, _SHARED_NAMES)]
    for title, model in _TITLE_TO_MODEL.items():
        fields = model.model_fields
        names = [name for name in fields if name not in _SHARED_NAMES and not is_hidden(fields[name])]
        names.sort(key=lambda name: not is_positional(fields[name]))
        parts.append(_table(f"{title} (`{model.model_config['env_prefix']}…`)", model, names))
    return "".join(f"{part}\n" for part in parts)


def _table(title: str, model: type[ServiceSettings], names: Iterable[str]) -> str:
    rows = "".join(_row(name, model.model_fields[name]) for name in names)
    return f"**{title}**\n\n| setting | default | meaning |\n|---|---|---|\n{rows}"


def _row(name: str, field: FieldInfo) -> str:
    flag = "MODEL_DIR" if is_positional(field) else f"--{name.replace('_', '-')}"
    choices = [f"`{value}`" for value in _choices(field.annotation)]
    meaning = f"{field.description} One of {', '.join(choices)}." if choices else field.description
    return f"| `{flag}` | {_default(field)} | {str(meaning).replace('|', chr(92) + '|')} |\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return "not set"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    if isinstance(field.default, tuple):
        return f"`{','.join(field.default)}`" if field.default else "not set"
    return f"`{field.default}`"


def _choices(annotation: Any) -> Iterator[object]:
    """The values of a Literal, also of one that may be None; none where something else is possible as well."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not types.NoneType]
        if len(members) == 1:
            yield from _choices(members[0])


if __name__ == "__main__":
    main()
