"""Copies of a step's arrays on the device."""

from __future__ import annotations

import numpy as np
import torch

from services.worker.forward.staging import HostArrays, PinnedStaging, SharedStaging, to_device, upload_arrays


def test_on_the_cpu_a_tensor_shares_the_arrays_memory() -> None:
    values = np.arange(3, dtype=np.int32)
    tensor = to_device(values, torch.device("cpu"))
    values[1] = 7
    assert tensor.dtype == torch.int32
    assert tensor.tolist() == [0, 7, 2]


def test_on_another_device_it_has_shape_and_dtype() -> None:
    tensor = to_device(np.zeros((2, 3), np.int64), torch.device("meta"))
    assert (tensor.device.type, tensor.shape, tensor.dtype) == ("meta", (2, 3), torch.int64)


def test_packed_arrays_arrive_with_their_names_shapes_and_dtypes() -> None:
    arrays: HostArrays = {
        "one": np.arange(3, dtype=np.int32),
        "none": np.empty(0, np.int64),
        "table": np.arange(6, dtype=np.float32).reshape(2, 3),
        "strided": np.arange(10, dtype=np.int64)[::2],
    }
    packed = PinnedStaging(torch.device("cpu"), is_pinned=False)
    packed.pack(arrays)
    for staging in (SharedStaging(arrays), packed):
        there = staging.upload()
        assert there.keys() == arrays.keys()
        for name, values in arrays.items():
            np.testing.assert_array_equal(there[name].numpy(), values, strict=True)


def test_arrays_of_no_step_are_shared_on_the_cpu_and_copied_elsewhere() -> None:
    arrays: HostArrays = {"ids": np.arange(5, dtype=np.int64), "table": np.zeros((2, 3), np.int32)}
    shared, copied = (upload_arrays(arrays, torch.device(name)) for name in ("cpu", "meta"))
    arrays["ids"][2] = 9
    assert shared["ids"].tolist() == [0, 1, 9, 3, 4]
    assert [(name, values.shape, values.dtype) for name, values in copied.items()] == [
        ("ids", (5,), torch.int64),
        ("table", (2, 3), torch.int32),
    ]


def test_packed_memory_serves_larger_and_smaller_steps_one_after_the_other() -> None:
    staging = PinnedStaging(torch.device("cpu"), is_pinned=False)
    for size in (3, 1000, 1, 0, 500):
        values = np.arange(size, dtype=np.int64)
        staging.pack({"values": values, "more": values.astype(np.int32)})
        there = staging.upload()
        values_there = there["values"].clone()
        staging.download([there["values"] + 1, there["more"].view(1, -1)])
        read = staging.read()
        # Neither what was uploaded nor what was read is in the memory of the next step.
        staging.pack({"values": values - 5})
        staging.download([torch.full((2000,), 7)])
        assert there["values"].tolist() == values_there.tolist() == list(range(size))
        np.testing.assert_array_equal(read[0], values + 1, strict=True)
        np.testing.assert_array_equal(read[1], values.astype(np.int32)[None], strict=True)


def test_results_arrive_in_their_order() -> None:
    results = [torch.arange(3), torch.ones(2, 2), torch.zeros(0, dtype=torch.int32)]
    packed = PinnedStaging(torch.device("cpu"), is_pinned=False)
    packed.pack({})
    for staging in (SharedStaging({}), packed):
        staging.download(results)
        for read, result in zip(staging.read(), results, strict=True):
            np.testing.assert_array_equal(read, result.numpy(), strict=True)
