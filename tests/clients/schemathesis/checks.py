"""What schemathesis draws from `/openapi.json`: no answer is a 5xx, and all have the form that is described there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

# Not whether what the schema allows is accepted: limits depend on the model, such as the number of its tokens.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
SEED = 1


def check_no_answer_contradicts_the_description(cell: SimpleNamespace) -> None:
    command = [
        str(Path(sys.executable).parent / "schemathesis"),
        "run",
        f"{cell.url}/openapi.json",
        f"--checks={','.join(CHECKS)}",
        "--phases=examples,coverage,fuzzing",
        "--max-examples=10",
        f"--seed={SEED}",
        "--generation-database=none",
        "--continue-on-failure",
        "--request-timeout=120",
        "--no-color",
    ]
    folder = Path(__file__).parent
    hooks = {"PYTHONPATH": str(folder), "SCHEMATHESIS_HOOKS": "limits"}
    done = subprocess.run(command, check=False, env=os.environ | hooks, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
