"""`python -m shared.cli` runs the `lockstep` command, even where it is not installed."""

from __future__ import annotations

from shared.cli.main import main

main()
