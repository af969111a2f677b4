"""Copies a step's arrays from the host to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(values: npt.NDArray[np.generic[Any]], device: torch.device) -> Tensor:
    """A tensor of `values` on a device; on the CPU it shares their memory."""
    return torch.from_numpy(values).to(device)
