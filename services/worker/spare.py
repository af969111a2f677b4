"""A worker that waits, with its imports done, until it learns which one it is: `python -m services.worker.spare`.

Imports are most of what a restart takes. A spare has neither settings nor weights, no port, and no device's context.
"""

from __future__ import annotations

import sys
from importlib import import_module

from services.worker.__main__ import main as serve
from services.worker.__main__ import prepare_imports
from shared.process.handover import take_link, wait_for_flags
from shared.process.lifecycle import freeze_garbage

# What a worker on a CPU imports until it has computed a step of a model of ours, and one on a GPU but for its kernels.
_MODULES = ("services.worker.runner.start.build", "services.worker.ops.native.backend", "numpy.ma")


def main() -> int:
    """Import, wait, and then be a worker; returns the exit code, 0 if it was never asked to be one."""
    try:
        link = take_link()
    except OSError:
        sys.exit("error: only `lockstep serve` and `lockstep ranks` start spare workers")
    import_all()
    # Nothing of it is garbage: a collection that visits it would take the worker a tenth of a second, and more than one
    # comes while it loads.
    freeze_garbage()
    flags = wait_for_flags(link)
    if flags is None:
        return 0
    sys.argv[1:] = flags
    return serve()


def import_all() -> None:
    """Import what workers import, torch too."""
    prepare_imports()
    for module in _MODULES:
        import_module(module)
    from services.worker.weights.packed.sources import code_digest  # noqa: PLC0415 - it imports torch

    # Remembered: what this process packs is packed by the code that it has imported, not by what is installed later.
    code_digest()


if __name__ == "__main__":
    sys.exit(main())
