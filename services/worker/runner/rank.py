"""What a process computes all its epochs with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.worker.forward.forward_context import Progress
from services.worker.layout import RankLayout
from services.worker.models.protocol import CausalLM
from services.worker.ops import Ops
from services.worker.runner.step_totals import StepTotals
from services.worker.runner.stream import Stream


@dataclass(frozen=True, slots=True)
class Rank:
    """What a process computes all its epochs with."""

    model: CausalLM
    ops: Ops
    device: torch.device
    stream: Stream
    layout: RankLayout
    progress: Progress
    totals: StepTotals
