"""Copies of a step's arrays on the device."""

from __future__ import annotations

import numpy as np
import torch

from services.worker.forward.staging import to_device


def test_on_the_cpu_a_tensor_shares_the_arrays_memory() -> None:
    values = np.arange(3, dtype=np.int32)
    tensor = to_device(values, torch.device("cpu"))
    values[1] = 7
    assert tensor.dtype == torch.int32
    assert tensor.tolist() == [0, 7, 2]


def test_on_another_device_it_has_shape_and_dtype() -> None:
    tensor = to_device(np.zeros((2, 3), np.int64), torch.device("meta"))
    assert (tensor.device.type, tensor.shape, tensor.dtype) == ("meta", (2, 3), torch.int64)
