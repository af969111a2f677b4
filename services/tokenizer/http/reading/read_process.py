"""The process that forks those in which large bodies are read. Run as a module, with the service's socket as stdin."""

from __future__ import annotations

import sys

from services.tokenizer.forks.fork_server import run_fork_server
from services.tokenizer.http.reading.read_child import serve_bodies

if __name__ == "__main__":
    sys.exit(run_fork_server(int(sys.argv[1]), serve_bodies))
