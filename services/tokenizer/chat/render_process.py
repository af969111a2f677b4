"""The process that forks those in which chat templates are rendered.

Run as a module, with the service's socket as stdin; `render_forks` is what it does.
"""

from __future__ import annotations

import importlib
import sys


def main() -> int:
    """Entry point of the process."""
    # Rendering needs no torch; transformers would import one that is installed for workers.
    sys.modules["torch"] = None  # type: ignore[assignment]
    return int(importlib.import_module("services.tokenizer.chat.render_forks").main(int(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
