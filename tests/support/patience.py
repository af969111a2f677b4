"""How long tests wait for what must come."""

from __future__ import annotations

# Nothing is measured: it comes at once, on a machine that others use it takes many times as long, and what hangs fails.
PATIENCE_S = 300.0
