"""The stages of the benchmark by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.bench.gpu import decode, ops, packed, serve, tokens, trace, tune
from tests.bench.gpu.cases import Case
from tests.bench.gpu.runners import Bench

STAGES: dict[str, Callable[[Bench], Iterator[Case]]] = {
    "ops": ops.cases,
    "tune": tune.cases,
    "decode": decode.cases,
    "packed": packed.cases,
    "tokens": tokens.cases,
    "trace": trace.cases,
    "start": serve.start_cases,
    "serve": serve.cases,
}
