"""Which device and kernels the settings mean."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.worker import device
from services.worker.config import WorkerSettings
from services.worker.device import DeviceChoice, DeviceError, check_device, choose_device


def choose(**settings: Any) -> DeviceChoice:
    return choose_device(WorkerSettings(model_dir=Path("model"), **settings).device_request)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which torch sees two GPUs."""
    monkeypatch.setattr(device, "has_gpu_node", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["auto", "cpu"])
@pytest.mark.parametrize(("machine", "backend"), [("x86_64", "native"), ("aarch64", "cpu")])
def test_without_a_gpu_everything_is_for_the_cpu(
    name: str, machine: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert choose(device=name) == DeviceChoice(torch.device("cpu"), backend)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_rank_takes_the_gpu_of_its_index(name: str) -> None:
    assert choose(device=name, device_index=1) == DeviceChoice(torch.device("cuda", 1), "triton")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("architecture", "folder", "backend"),
    [
        ("gfx942:sramecc+:xnack-", "aiter/jit", "aiter"),
        ("gfx950", "aiter/jit", "aiter"),
        ("gfx942", "another/jit", "triton"),
        # An unrelated package of the same name.
        ("gfx942", "aiter/tests", "triton"),
        ("gfx1100", "aiter/jit", "triton"),
    ],
)
def test_an_amd_gpu_gets_aiter_where_it_can_run(
    architecture: str, folder: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(gcnArchName=architecture))
    (tmp_path / folder).mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert choose() == DeviceChoice(torch.device("cuda", 0), backend)


@pytest.mark.usefixtures("two_gpus")
def test_what_is_set_is_not_chosen() -> None:
    assert choose(ops_backend="reference") == DeviceChoice(torch.device("cuda", 0), "reference")
    assert choose(device="cpu", ops_backend="native") == DeviceChoice(torch.device("cpu"), "native")


@pytest.mark.usefixtures("two_gpus")
def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(DeviceError, match="rank 2 on this machine has no GPU of its own: 2 are visible"):
        choose(device_index=2)


@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_that_torch_does_not_see_is_refused() -> None:
    with pytest.raises(DeviceError, match="torch sees no GPU"):
        check_device(WorkerSettings(model_dir=Path("model"), device="cuda").device_request)


@pytest.mark.usefixtures("two_gpus")
def test_kernels_for_the_cpu_are_refused_on_a_gpu() -> None:
    with pytest.raises(DeviceError, match="--ops-backend native does not run on a GPU"):
        choose(ops_backend="native")


@pytest.mark.process
def test_checking_the_flags_names_the_missing_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    flags = ["--model-dir=model", "--device=cuda"]
    command = [sys.executable, "-m", "services.worker.config", *flags]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr.strip()) == (1, "error: --device cuda: torch sees no GPU")
