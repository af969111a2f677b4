"""The pack for a machine without network: cut here, joined there."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shared.release import DISTRIBUTION
from tests.bench.gpu.pack import REQUIREMENTS, cut_model
from tests.bench.gpu.unpack import copy_stubs, has_base, join_model, make_environment, unpacked_dir, without_pack

ROOT = Path(__file__).parents[3]
CONTENTS = {"config.json": b"{}", "model.safetensors": bytes(range(250)), "tokenizer.json": b"", "whole": b"x" * 120}
# What the machine has, and the scheduler's client of Kubernetes, which it imports only in a cluster.
ELSEWHERE = {"torch", "triton", "numpy", "xxhash", "transformers", "huggingface-hub", "kubernetes"}


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    for name, content in CONTENTS.items():
        (model / name).write_bytes(content)
    cut_model(model, tmp_path / "pack", part_bytes=60)
    shutil.rmtree(model)
    return tmp_path / "pack"


def test_a_model_is_cut_into_folders_and_joined_when_all_have_come(pack: Path, tmp_path: Path) -> None:
    folders = sorted(folder for folder in pack.iterdir() if folder.name.startswith("model-"))
    assert len(folders) > 2
    assert all(sum(part.stat().st_size for part in folder.iterdir()) <= 3 * 60 for folder in folders)
    home = tmp_path / "home"
    # Each transfer brings one folder in place of the one before.
    arrived = tmp_path / "arrived"
    for folder in (pack / "base", *folders):
        assert join_model(arrived, home) is None
        shutil.rmtree(arrived, ignore_errors=True)
        shutil.copytree(folder, arrived / folder.name)
    model = join_model(arrived, home)
    assert model is not None
    assert {path.name: path.read_bytes() for path in model.iterdir()} == CONTENTS
    assert join_model(arrived, home) == model


def test_a_spoilt_part_is_noticed(pack: Path, tmp_path: Path) -> None:
    part = next(pack.glob("model-*/model.safetensors.001"))
    content = part.read_bytes()
    part.write_bytes(content[::-1])
    # Not taken for a whole model the second time either.
    for _ in range(2):
        with pytest.raises(ValueError, match=r"model\.safetensors differs"):
            join_model(pack, tmp_path / "home")
    part.write_bytes(content)
    assert join_model(pack, tmp_path / "home") is not None


def test_a_pack_without_a_model_has_none(tmp_path: Path) -> None:
    assert join_model(tmp_path, tmp_path / "home") is None


def test_the_pack_has_what_the_services_need_and_what_that_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = names_of([*project["dependencies"], *extras["worker"], *extras["tokenizer"], *extras["scheduler"]])
    for name in REQUIREMENTS:
        wanted |= names_of(requires(name) or ())
    # The tokenizer's extra includes `pull`, which no service imports.
    assert wanted - set(REQUIREMENTS) - {DISTRIBUTION} == ELSEWHERE & wanted


def test_stubs_go_beside_their_protos(tmp_path: Path) -> None:
    stubs, protos = tmp_path / "pack" / "base" / "stubs" / "a" / "v1", tmp_path / "protos" / "a" / "v1"
    for folder in (stubs, protos):
        folder.mkdir(parents=True)
    (stubs / "x_pb2.py").write_text("new")
    (protos / "x.proto").write_text("proto")
    copy_stubs(tmp_path / "pack", tmp_path / "protos")
    assert sorted(path.name for path in protos.iterdir()) == ["x.proto", "x_pb2.py"]


@pytest.mark.parametrize(
    ("flags", "rest"),
    [
        (["--pack", "a", "--stages", "ops"], ["--stages", "ops"]),
        (["--stages", "ops", "--pack=a", "--json", "x"], ["--stages", "ops", "--json", "x"]),
        (["--json", "x"], ["--json", "x"]),
    ],
)
def test_the_benchmark_begins_anew_without_the_pack(flags: list[str], rest: list[str]) -> None:
    assert without_pack(flags) == rest


def test_a_pack_is_installed_beside_itself(tmp_path: Path) -> None:
    assert unpacked_dir(tmp_path / "pack") == tmp_path / "pack-installed"
    assert not has_base(tmp_path / "pack")
    (tmp_path / "pack-installed").mkdir()
    assert has_base(tmp_path / "pack")


@pytest.mark.slow
def test_the_environment_has_the_wheels_before_what_the_machine_has(tmp_path: Path) -> None:
    write_wheel(tmp_path / "pack" / "base" / "wheels", "xxhash")
    python = make_environment(tmp_path / "pack", tmp_path / "home")
    code = "import xxhash, numpy; print(xxhash.ORIGIN, numpy.__name__)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "the pack numpy\n"
    # Installed once: there need not be wheels the second time.
    shutil.rmtree(tmp_path / "pack")
    assert make_environment(tmp_path / "pack", tmp_path / "home") == python


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pack", "/nowhere"], "--pack /nowhere: there is no /nowhere/base"),
        (["--model", "/nowhere"], "--model /nowhere: there is no config.json"),
        (["--shapes", "qwen3-9b"], "invalid choice: 'qwen3-9b'"),
        (["--stages", "ops,decod"], "there is no stage 'decod'; there are ops, tune, decode, packed,"),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_starts(flags: list[str], message: str) -> None:
    command = [sys.executable, "-m", "tests.bench.gpu", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def names_of(requirements: Sequence[str]) -> set[str]:
    """Packages of requirements that hold without an extra."""
    parsed = [Requirement(each) for each in requirements]
    return {
        canonicalize_name(each.name)
        for each in parsed
        if each.marker is None or each.marker.evaluate({"extra": "", "python_version": "3.12"})
    }


def write_wheel(folder: Path, name: str) -> None:
    """A wheel of a module that says where it is from."""
    folder.mkdir(parents=True)
    info = f"{name}-99.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-99.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "ORIGIN = 'the pack'\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n")
