"""How long tests wait for something that must happen."""

from __future__ import annotations

# Not a measurement: normally it happens at once, on a busy machine it takes many times as long, and a hang fails.
PATIENCE_S = 300.0
