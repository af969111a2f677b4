"""`python -m services.cli` runs the `lockstep` command, even where it is not installed."""

from __future__ import annotations

from services.cli.main import main

main()
