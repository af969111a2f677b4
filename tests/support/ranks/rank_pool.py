"""Rank processes for small models, kept from one model to the next."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from tests.support.ranks.rank_process import RankJob, result_file
from tests.support.system.ports import free_port
from tests.support.system.processes import LineProcesses


@dataclass(frozen=True)
class RankResult:
    """What one rank computed, per prompt."""

    tokens: list[list[int]]
    """[num_tokens] each."""
    logits: list[Tensor]
    """[num_tokens, vocabulary] each."""
    mtp_logits: list[list[Tensor]]
    """Logits of the MTP layers on each prompt, one tensor per layer."""
    weights_digest: str
    cache_bytes_per_token: int


class RankPool:
    """Ranks that load any model and complete prompts."""

    def __init__(
        self, module: str = "tests.support.ranks.rank_process", environment: Mapping[str, str] | None = None
    ) -> None:
        self._processes = LineProcesses(module, environment)
        # Rendezvous address and start id by kind of job; ranks stay connected.
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
        """Generate greedy completions on `tp_size` ranks.

        Args:
            prompts: At least one token each.
            num_tokens: Tokens per completion.
            batches: Indexes of the prompts computed together; None means all in one batch.
            more: Further fields of `RankJob`.
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
        """Kill the processes."""
        self._processes.close()
        self._meetings.clear()

    def _meeting(self, *kind: Any) -> tuple[str, str]:
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
