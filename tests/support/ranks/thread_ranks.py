"""Ranks of one model as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

from services.worker.layout import RankLayout
from services.worker.parallel.communicator import Parallel
from services.worker.parallel.distributed import make_parallel
from services.worker.parallel.rendezvous import open_rendezvous
from tests.support.system.patience import PATIENCE_S

Result = TypeVar("Result")
# Longer than anything here takes; a rank whose peers have failed ends after this.
_TIMEOUT = timedelta(seconds=PATIENCE_S)


def run_ranks(
    layouts: list[RankLayout], function: Callable[[Parallel], Result], *, is_exact: bool = True, host: str = "127.0.0.1"
) -> list[Result]:
    """Run `function` on each rank of one failure domain; the ranks connect to each other as processes do, on `host`."""
    rendezvous = replace(open_rendezvous(host), timeout=_TIMEOUT)
    # A rank that has connected may finish, and close its connections, before the others have connected.
    have_met = threading.Barrier(len(layouts), timeout=_TIMEOUT.total_seconds())

    def run(layout: RankLayout) -> Result:
        parallel = make_parallel(layout, rendezvous, is_exact=is_exact)
        have_met.wait()
        return function(parallel)

    with ThreadPoolExecutor(len(layouts)) as pool:
        # Each in its caller's forward context, if there is one.
        contexts = [copy_context() for _ in layouts]
        return list(pool.map(lambda context, layout: context.run(run, layout), contexts, layouts))
