"""What reading bodies costs, each in a process of its own: `python -m tests.support.tokenizer.body_costs SIZE EVERY`.

Prints a JSON list: for every `EVERY`th body of `SIZE` bytes its name, the peak bytes that parsing it takes and that
reading it takes, and the CPU seconds for half its size and for all of it. With `full` for `SIZE`, the bodies have as
many objects as a body may have.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.tokenizer.http.fields.counts import MAX_OBJECTS, check_counts
from services.tokenizer.http.reading.crossing import pack
from services.tokenizer.http.reading.parsing import parse_body
from services.tokenizer.http.reading.readers import READERS
from services.tokenizer.http.refusals import HttpError
from tests.support.tokenizer.many_values import KINDS, bodies, full_bodies


def arguments_of(reader: str) -> dict[str, str]:
    """What a reader takes beside a body."""
    return {} if reader in ("read_tokenize_request", "read_detokenize_request") else {"request_id": "r"}


def read(reader: str, data: bytes) -> None:
    """Read a body, and pack what was read, as the process that reads large ones does."""
    try:
        pack(READERS[reader](parse_body(data), **arguments_of(reader)))
    except HttpError:
        return


def main(size: int | None, every: int) -> None:
    """Measure, and print; `size` is None for full bodies."""
    gc.disable()
    make_all = full_bodies if size is None else bodies
    sampled = [(reader, *each) for reader in KINDS for each in make_all(reader)][::every]
    costs = []
    for reader, name, make in sampled:
        num = size or _most(reader, make)
        costs.append(_costs(reader, name, make(num // 2), make(num)))
    sys.stdout.write(json.dumps(costs))


def _most(reader: str, make: Callable[[int], bytes]) -> int:
    """How many items a body may have that has as many objects as it may have."""
    return bisect_left(range(MAX_OBJECTS + 1), True, key=lambda num: not _is_counted(reader, make(num))) - 1


def _is_counted(reader: str, data: bytes) -> bool:
    """Whether a body has so few objects that it is read."""
    try:
        check_counts(KINDS[reader][0], parse_body(data))
    except HttpError:
        return False
    return True


def _costs(reader: str, name: str, half: bytes, whole: bytes) -> dict[str, Any]:
    parsed, _ = measured(lambda: _try_to_parse(whole))
    # What disturbs a measurement disturbs one of them.
    taken = [measured(lambda: read(reader, whole)) for _ in range(2)]
    half_s = max(measured(lambda: read(reader, half))[1] for _ in range(2))
    whole_s = min(cpu_s for _, cpu_s in taken)
    return {"name": f"{reader}: {name}", "parsed": parsed, "read": taken[0][0], "half_s": half_s, "whole_s": whole_s}


def _try_to_parse(data: bytes) -> None:
    parse_body(data)


def measured(work: Callable[[], object]) -> tuple[int, float]:
    """The peak of its memory in bytes, and its CPU time in seconds, in a forked process."""
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before, began = _peak(), time.process_time()
        work()
        os.write(theirs, json.dumps([_peak() - before, time.process_time() - began]).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as answer:
        num_bytes, cpu_s = json.loads(answer.read())
    os.waitpid(pid, 0)
    return num_bytes, cpu_s


def _peak() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main(None if sys.argv[1] == "full" else int(sys.argv[1]), int(sys.argv[2]))
