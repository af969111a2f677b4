"""A process that waits for flags as a spare worker does, without its imports, and says which it got."""

from __future__ import annotations

import sys

from shared.process.handover import take_link, wait_for_flags

if __name__ == "__main__":
    flags = wait_for_flags(take_link())
    if flags is not None:
        sys.stderr.write(f"a service with {flags}\n")
