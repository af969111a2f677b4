"""How kernels are told the type of a tensor's elements: the numbers of `Format` in kernels/abi.h."""

from __future__ import annotations

import torch

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
