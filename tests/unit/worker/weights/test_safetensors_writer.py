"""A safetensors file that is written from parts is what the library reads, with the digest that workers compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.worker.weights.safetensors_writer import StreamedTensor, write_safetensors
from services.worker.weights.weight_files import TensorHeader, WeightFiles
from shared.model_files.model_dir import WEIGHTS

BYTES = np.arange(7, dtype=np.uint8)
ROWS = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)


def streamed(name: str, dtype: str, shape: tuple[int, ...], *parts: np.ndarray) -> StreamedTensor:
    return StreamedTensor(name, TensorHeader(dtype, shape), lambda: iter(parts))


def test_a_file_has_the_values_of_all_parts_and_the_digest_of_what_is_read(tmp_path: Path) -> None:
    progress: list[float] = []
    tensors = [
        streamed("odd.blocks", "U8", (7,), BYTES),
        streamed("b", "F16", (6, 4), *np.array_split(ROWS.astype(np.float16), 4)),
        streamed("a", "F32", (6, 4), ROWS[:1], ROWS[1:]),
        streamed("c", "BF16", (2,), np.array([0x3F80, 0xC000], np.uint16)),
    ]
    digest = write_safetensors(tmp_path / WEIGHTS, tensors, progress.append)
    found = load_file(tmp_path / WEIGHTS)
    assert torch.equal(found["odd.blocks"], torch.from_numpy(BYTES))
    assert torch.equal(found["b"], torch.from_numpy(ROWS).half())
    assert torch.equal(found["a"], torch.from_numpy(ROWS))
    assert found["c"].tolist() == [1.0, -2.0]
    assert progress == sorted(progress)
    assert progress[-1] == 1
    with WeightFiles(tmp_path) as files:
        for name in files.names:
            files.read(name)
        assert files.digest() == digest


def test_a_file_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_safetensors(tmp_path / WEIGHTS, [streamed("a", "U8", (7,), BYTES)])
    assert (tmp_path / WEIGHTS).read_bytes() == b"mine"
