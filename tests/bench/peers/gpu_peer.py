"""transformers' continuous batching as a peer on a GPU, in the environment that this process runs in."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.gpu.serving.requests import Request, num_output_tokens
from tests.bench.peers.environments import LeftOutError
from tests.support.system.processes import ROOT, module_command, module_environment

# What a stage of 540 s has left after the cell and the runner in process; only a peer that hangs takes as long.
_TIMEOUT_S = 330.0
_MOST_CHARACTERS = 120


@dataclass(frozen=True, slots=True)
class PeerResult:
    """What the peer did."""

    tokens_per_s: float
    """Of answers, prompts' time included."""
    version: str
    attention: str
    """The name of its implementation."""
    graphs: str


def run_transformers(
    model_dir: Path, device: str, requests: Sequence[Request], warm_up: Sequence[Request]
) -> PeerResult:
    """Serve requests after a warm-up, with random weights of a directory's configuration.

    Raises:
        LeftOutError: it could not be run here; the message is the beginning of the last line that it wrote.
    """
    load = {
        "model_dir": str(model_dir),
        "device": device,
        "warm_up": [[each.prompt, each.num_output_tokens] for each in warm_up],
        "requests": [[each.prompt, each.num_output_tokens] for each in requests],
    }
    command = module_command("tests.bench.peers.gpu_transformers")
    environment = {**module_environment(), "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            input=json.dumps(load) + "\n",
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LeftOutError(f"no answer after {_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        raise LeftOutError((done.stderr.strip().splitlines() or ["no output"])[-1][:_MOST_CHARACTERS])
    answer = json.loads(done.stdout)
    graphs = "graphs, ahead" if answer["graphs"] else "no graphs"
    rate = num_output_tokens(requests) / answer["seconds"]
    return PeerResult(rate, answer["version"], answer["attention"], graphs)
