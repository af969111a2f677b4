"""`python -m shared.cli` is the `lockstep` command, also where it is not installed."""

from __future__ import annotations

from shared.cli.main import main

main()
