"""The process in which services check their flags, one after the other: `python -m services.cli.processes.flag_checks`.

One process does it for all, since most of a check is importing what they share. It ends as the first service ends that
rejects its flags; the last line with the mark says which one that is.
"""

from __future__ import annotations

import json
import runpy
import sys

MARK = "\x1e"
"""What a line begins with that names the service whose flags are checked next."""
SETTINGS = "\x1f"
"""What a line begins with that has its settings, in JSON."""


def main() -> int:
    """Check what stdin brings: a list of the services' settings modules and their flags, in JSON.

    Each service's settings that differ from their defaults are written to stdout.
    """
    for module, flags in json.load(sys.stdin):
        print(f"{MARK}{module}", flush=True)
        sys.argv = [module, *flags]
        try:
            # Run as a program, a settings module checks the flags.
            found = runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                raise
        else:
            print(f"{SETTINGS}{found['settings'].model_dump_json(exclude_defaults=True)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
