"""One rank of some models: `python -m tests.support.rank_process RANK` computes what its standard input asks for.

Each line is a `RankJob`. The answer is a line of its own: "done" when the job's results are written. Whatever goes
wrong ends the process, so that its partners notice.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
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
from services.worker.parallel.distributed import Rendezvous, make_parallel
from tests.support.generation import Way, generate
from tests.support.mtp_logits import our_mtp_logits
from tests.support.paged_model import PagedModel
from tests.support.patience import PATIENCE_S

_NUM_BLOCKS = 2048
# Longer than any step of a small model takes where all cores are busy.
_TIMEOUT = timedelta(seconds=PATIENCE_S)


@dataclass(frozen=True)
class RankJob:
    """Greedy completions that some ranks compute together, each way from a new cache."""

    # Where the ranks meet; equal for jobs that use the same connections.
    rendezvous: str
    start_id: str
    tp_size: int
    model_dir: str
    backend: str
    prompts: Sequence[Sequence[int]]
    num_tokens: int
    # The batches of each way: the numbers of their prompts.
    batches: Sequence[Sequence[int]]
    # Where each rank writes its results, under its own number.
    out_dir: str
    has_expert_parallel: bool = False
    # Also what layers for multi-token prediction make of the prompts.
    has_mtp: bool = False
    way: Way = field(default_factory=Way)

    def to_line(self) -> str:
        """As it is sent."""
        return json.dumps(asdict(self), default=list) + "\n"

    @classmethod
    def from_line(cls, line: str) -> RankJob:
        """As it was sent."""
        values = json.loads(line)
        return cls(**{**values, "way": Way(**values["way"])})


def result_file(out_dir: Path | str, rank: int) -> Path:
    """Where a rank's results are: of prompt n "tokens.n" [num_tokens] and "logits.n" [num_tokens, vocabulary].

    And of MTP layer k "mtp.k.n". The metadata are the digest of the weights, and the bytes that a token keeps in the
    cache.
    """
    return Path(out_dir) / f"{rank}.safetensors"


def main(rank: int) -> None:
    """Do all jobs."""
    # The ranks share the cores.
    torch.set_num_threads(1)
    for line in sys.stdin:
        _run(RankJob.from_line(line), rank)
        print("done", flush=True)  # noqa: T201


def _run(job: RankJob, rank: int) -> None:
    layout = RankLayout(tp_rank=rank, tp_size=job.tp_size, has_expert_parallel=job.has_expert_parallel)
    ops, options = load_ops(job.backend), LoadOptions(with_mtp=job.has_mtp)
    parallel = _connect(layout, job.rendezvous, job.start_id, is_exact=ops.is_exact)
    loaded = load_model(Path(job.model_dir), ops, torch.float32, lambda _: None, options=options, parallel=parallel)
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
    return make_parallel(layout, Rendezvous(rendezvous, start_id, timeout=_TIMEOUT), is_exact=is_exact)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    # As workers leave: connections end with the process.
    os._exit(0)
