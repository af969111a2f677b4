"""`make simulate`: runs any number of seeds."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

from tests.simulation.faults import Fault
from tests.simulation.simulation import SimulationError, simulate

_SEEDS_PER_LINE = 100


def main() -> int:
    """Run seeds, print each failure with the command that reproduces it, and return the exit code."""
    parser = argparse.ArgumentParser(description="Simulate cells under random faults, one per seed.")
    parser.add_argument("--seeds", type=int, default=_SEEDS_PER_LINE, help="number of seeds to run")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--faults", help="comma-separated kinds, or none; default: a random subset per seed")
    options = parser.parse_args()
    # The services would warn about every fault that was drawn.
    logging.disable()
    kinds = None if options.faults is None else [Fault(name) for name in options.faults.split(",") if name != "none"]
    num_failed = num_events = num_requests = 0
    ends: Counter[str] = Counter()
    began_at = time.perf_counter()
    for number, seed in enumerate(range(options.first_seed, options.first_seed + options.seeds), 1):
        try:
            report = simulate(seed, kinds)
        except SimulationError as error:
            num_failed += 1
            _print(str(error))
            continue
        num_events += report.num_events
        num_requests += report.num_requests
        ends += report.ends
        if number % _SEEDS_PER_LINE == 0 or number == options.seeds:
            rate = number / (time.perf_counter() - began_at)
            failed = f"{num_failed} failed" if num_failed else "none failed"
            _print(f"{number} seeds, {failed}, {rate:.1f} a second: {num_requests} requests, {num_events} events")
    _print(", ".join(f"{count} {end}" for end, count in ends.most_common()))
    return 1 if num_failed else 0


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
