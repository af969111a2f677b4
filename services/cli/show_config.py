"""`lockstep config`: the settings that a start of `lockstep serve` would have, in the form that `--config` reads.

Those at their defaults are left out: together with them, some would be refused.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.cli.api_key import forget_api_key
from services.cli.cell_plan import plan_services
from services.cli.extras import missing_packages
from services.cli.processes.preflight import RefusedError, read_settings
from services.cli.processes.service_flags import ROLE_TO_FLAGS
from services.cli.serve_arguments import read_serve_arguments
from services.cli.serve_settings import RESERVED_FLAGS, ServeSettings
from shared.config import ServiceSettings

# What every service gets of the launcher's own.
_SHARED = frozenset(ServiceSettings.model_fields)


def main(argv: Sequence[str]) -> int:
    """Print the settings; returns the exit code. What is secret, and the prompt, is left out."""
    arguments = read_serve_arguments(argv)
    forget_api_key()
    if problem := missing_packages("config", ["config"]):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    import yaml  # noqa: PLC0415 - an extra has it

    settings = arguments.settings
    shown: dict[str, Any] = _named(settings.model_dump(mode="json", exclude={"config"}, exclude_defaults=True))
    commands = plan_services(settings, arguments.service_flags, Path("/run/lockstep"))
    try:
        role_to_settings = asyncio.run(read_settings(commands))
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for role, values in role_to_settings.items():
        hidden = {flag.replace("-", "_") for flag in RESERVED_FLAGS[role]} | _SHARED | {*ServeSettings.model_fields}
        own = _named({name: value for name, value in values.items() if name not in hidden})
        if section := {name: value for name, value in own.items() if name in ROLE_TO_FLAGS[role]}:
            shown[role] = section
    sys.stdout.write(yaml.safe_dump(json.loads(json.dumps(shown)), sort_keys=False))
    return 0


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values that are set, by the names of flags."""
    return {name.replace("_", "-"): value for name, value in values.items() if value not in (None, [])}
