"""Processes that are the ranks of small models, kept from one model to the next."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from tests.support.ports import free_port
from tests.support.processes import LineProcesses
from tests.support.rank_process import RankJob, result_file


@dataclass(frozen=True)
class RankResult:
    """What one rank computed, prompt by prompt."""

    # Each [num_tokens].
    tokens: list[list[int]]
    # Each [num_tokens, vocabulary].
    logits: list[Tensor]
    # Of the prompts, MTP layer by MTP layer.
    mtp_logits: list[list[Tensor]]
    weights_digest: str
    cache_bytes_per_token: int


class RankPool:
    """Ranks that load any model and complete prompts with it."""

    def __init__(self) -> None:
        self._processes = LineProcesses("tests.support.rank_process")
        # Where ranks met for jobs of a kind: they stay connected.
        self._meetings: dict[tuple[Any, ...], tuple[str, str]] = {}

    def generate(
        self,
        model_dir: Path,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        tp_size: int,
        backend: str = "reference",
        batches: Sequence[Sequence[int]] | None = None,
        **more: Any,
    ) -> list[RankResult]:
        """Greedy completions by `tp_size` ranks.

        Args:
            model_dir: The model.
            prompts: At least one token each.
            num_tokens: Of each completion.
            tp_size: How many ranks.
            backend: That all ranks run.
            batches: The numbers of the prompts that are computed together; None: all are.
            more: See `RankJob`.
        """
        meeting = self._meeting(tp_size, backend, more.get("has_expert_parallel"))
        with tempfile.TemporaryDirectory() as out_dir:
            job = RankJob(
                *meeting,
                tp_size,
                str(model_dir),
                backend,
                prompts,
                num_tokens,
                batches or [range(len(prompts))],
                out_dir,
                **more,
            )
            self._run(job)
            return [_read(result_file(out_dir, rank), len(prompts)) for rank in range(tp_size)]

    def close(self) -> None:
        """End the processes."""
        self._processes.close()
        self._meetings.clear()

    def _meeting(self, *kind: Any) -> tuple[str, str]:
        """Address and start id for jobs of a kind."""
        if kind not in self._meetings:
            self._meetings[kind] = f"127.0.0.1:{free_port()}", "-".join(map(str, kind))
        return self._meetings[kind]

    def _run(self, job: RankJob) -> None:
        try:
            self._processes.ask([job.to_line()] * job.tp_size)
        except RuntimeError:
            self._meetings.clear()
            raise


def _read(path: Path, num_prompts: int) -> RankResult:
    with safe_open(path, framework="pt") as file:
        facts = file.metadata()
        mtp_names = [
            [name for name in file.keys() if name.startswith("mtp.") and name.endswith(f".{number}")]  # noqa: SIM118
            for number in range(num_prompts)
        ]
        return RankResult(
            tokens=[file.get_tensor(f"tokens.{number}").tolist() for number in range(num_prompts)],
            logits=[file.get_tensor(f"logits.{number}") for number in range(num_prompts)],
            mtp_logits=[[file.get_tensor(name) for name in sorted(names)] for names in mtp_names if names],
            weights_digest=facts["digest"],
            cache_bytes_per_token=int(facts["cache"]),
        )
