"""One rank of a model: `python -m tests.support.ranks.rank_process RANK` runs the jobs on its standard input.

Each line is a `RankJob`, answered with the line "done" once its results are written. Any error ends the process, so
that its peers notice.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from services.worker.layout import RankLayout
from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import load_ops
from services.worker.parallel.communicator import Parallel
from services.worker.parallel.distributed import make_parallel
from tests.support.models.generation import Way, generate
from tests.support.models.mtp_logits import our_mtp_logits
from tests.support.models.paged_model import PagedModel
from tests.support.ranks.meeting import meet_at
from tests.support.system.patience import PATIENCE_S

_NUM_BLOCKS = 2048
# Longer than any step of a small model takes on a busy machine.
_TIMEOUT = timedelta(seconds=PATIENCE_S)


@dataclass(frozen=True)
class RankJob:
    """Greedy completions computed by several ranks together, each batch with a new cache."""

    rendezvous: str
    """Where the ranks connect; equal, like `start_id`, for jobs that share connections."""
    start_id: str
    tp_size: int
    model_dir: str
    backend: str
    prompts: Sequence[Sequence[int]]
    num_tokens: int
    batches: Sequence[Sequence[int]]
    """Indexes of the prompts in each batch."""
    out_dir: str
    """Where each rank writes its results; see `result_file`."""
    has_expert_parallel: bool = False
    dtype: str = "float32"
    has_mtp: bool = False
    """Whether to compute the logits of the MTP layers on the prompts too."""
    way: Way = field(default_factory=Way)

    def to_line(self) -> str:
        """Encode as one line."""
        return json.dumps(asdict(self), default=list) + "\n"

    @classmethod
    def from_line(cls, line: str) -> RankJob:
        """Decode from one line."""
        values = json.loads(line)
        return cls(**{**values, "way": Way(**values["way"])})


def result_file(out_dir: Path | str, rank: int) -> Path:
    """The path of a rank's results.

    Tensors for prompt n: "tokens.n" [num_tokens], "logits.n" [num_tokens, vocabulary], and "mtp.k.n" for MTP layer k.
    Metadata: the digest of the weights, and the cache bytes per token.
    """
    return Path(out_dir) / f"{rank}.safetensors"


def main(rank: int) -> None:
    """Run all jobs."""
    # The ranks share the cores.
    torch.set_num_threads(1)
    for line in sys.stdin:
        _run(RankJob.from_line(line), rank)
        print("done", flush=True)  # noqa: T201


def _run(job: RankJob, rank: int) -> None:
    layout = RankLayout(tp_rank=rank, tp_size=job.tp_size, has_expert_parallel=job.has_expert_parallel)
    ops, options = load_ops(job.backend), LoadOptions(with_mtp=job.has_mtp)
    parallel = _connect(layout, job.rendezvous, job.start_id, is_exact=ops.is_exact)
    loaded = load_model(
        Path(job.model_dir), ops, getattr(torch, job.dtype), lambda _: None, options=options, parallel=parallel
    )
    tensors: dict[str, Tensor] = {}
    for batch in job.batches:
        paged = PagedModel(
            loaded.model, ops, num_blocks=_NUM_BLOCKS // job.way.block_size, block_size=job.way.block_size
        )
        prompts = [list(job.prompts[number]) for number in batch]
        for number, generated in zip(batch, generate(paged, prompts, job.num_tokens, job.way), strict=True):
            tensors[f"tokens.{number}"] = torch.tensor(generated.completion)
            tensors[f"logits.{number}"] = generated.logits
            if job.has_mtp:
                layers = our_mtp_logits(paged, job.prompts[number], chunk_size=len(job.prompts[number]))
                tensors |= {f"mtp.{layer}.{number}": logits for layer, logits in enumerate(layers)}
    facts = {"digest": loaded.weights_digest, "cache": str(loaded.model.kv_cache_spec.bytes_per_token)}
    save_file(tensors, result_file(job.out_dir, rank), metadata=facts)


@cache
def _connect(layout: RankLayout, rendezvous: str, start_id: str, *, is_exact: bool) -> Parallel:
    meeting = replace(meet_at(rendezvous, start_id, is_first=not layout.tp_rank), timeout=_TIMEOUT)
    return make_parallel(layout, meeting, is_exact=is_exact)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    # Exit as workers do: connections end with the process.
    os._exit(0)
