"""The process that forks those in which chat templates are rendered.

Run as a module, with the service's socket as stdin; `fork_server` is what it does.
"""

from __future__ import annotations

import importlib
import sys

from services.tokenizer.forks.fork_server import run_fork_server


def main() -> int:
    """Entry point of the process."""
    # Rendering needs no torch; transformers would import one that is installed for workers.
    sys.modules["torch"] = None  # type: ignore[assignment]
    child = importlib.import_module("services.tokenizer.chat.render_child")
    child.warm_up()
    return run_fork_server(int(sys.argv[1]), child.serve_renders)


if __name__ == "__main__":
    sys.exit(main())
