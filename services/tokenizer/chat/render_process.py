"""The process that forks those in which chat templates are rendered.

Run as a module, with the service's socket as stdin; `fork_server` is what it does.
"""

from __future__ import annotations

import sys

from services.tokenizer.chat.render_child import serve_renders, warm_up
from services.tokenizer.forks.fork_server import run_fork_server


def main() -> int:
    """Entry point of the process."""
    warm_up()
    return run_fork_server(int(sys.argv[1]), serve_renders)


if __name__ == "__main__":
    sys.exit(main())
