"""One rank of a model on the backend `aiter`, with stand-ins for its kernels; see `rank_process`."""

from __future__ import annotations

import os
import sys

from tests.support.aiter import triton_standins
from tests.support.ranks import rank_process

if __name__ == "__main__":
    # AITER's own messages go to standard error, as standard output has the answers.
    triton_standins.install()
    rank_process.main(int(sys.argv[1]))
    os._exit(0)
