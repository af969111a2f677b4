"""Numbers as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_COUNT = re.compile(r"(?P<number>\d+(?P<fraction>\.\d+)?)(?P<unit>[kmgtKMGT]?)", re.ASCII)


def parse_count(text: str) -> int:
    """Read a count: 8192, 8k and 25.6k with decimal units, 8K with binary ones, which take no fraction.

    What a fraction leaves below 1 is dropped.

    Raises:
        ValueError: it is none of these.

    Source: vLLM, `human_readable_int` in utils/argparse_utils.py.
    """
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no count: write 8192, 8k for 8000 or 8K for 8192")
    number, unit, has_fraction = found["number"], found["unit"], found["fraction"] is not None
    if unit in _DECIMAL:
        return int(Decimal(number) * _DECIMAL[unit])
    if has_fraction:
        hint = f"; {number}{unit.lower()} is {int(Decimal(number) * _DECIMAL[unit.lower()])}" if unit else ""
        raise ValueError(f"{text!r} is no count: only k, m, g and t take a fraction{hint}")
    return int(number) * _BINARY.get(unit, 1)
