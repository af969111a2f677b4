"""The stages of the benchmark by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.bench.gpu import decode, packed, tokens, trace
from tests.bench.gpu.cases import Case
from tests.bench.gpu.kernels import ops
from tests.bench.gpu.runners import Bench
from tests.bench.gpu.serving import serve
from tests.bench.gpu.tuning import tune

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
