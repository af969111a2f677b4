"""Run the tokenizer service: `python -m services.tokenizer --help`."""

from __future__ import annotations

import importlib
import os
import sys


def main() -> int:
    """Entry point of the process."""
    # Few models need transformers here. It would import a torch that is installed for workers, which the service does
    # not need and its image does not have: 3 s and 330 MiB.
    sys.modules["torch"] = None  # type: ignore[assignment]
    # Transformers' warnings are not in the log's format; it reads this when it is imported.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return int(importlib.import_module("services.tokenizer.service").main())


if __name__ == "__main__":
    sys.exit(main())
