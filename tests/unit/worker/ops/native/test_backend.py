"""Which kernels are loaded, and what happens where there are none."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.worker.device import DeviceError
from services.worker.ops import load_ops
from services.worker.ops.native import backend, library
from services.worker.ops.native import build as building
from services.worker.ops.native.build import BuildError, build, prebuild
from services.worker.ops.native.isa import Isa, available_isas, every_compiler_flags
from tests.support.system.processes import ROOT, module_environment


def write_sources(parent: Path) -> Path:
    """The sources of a library that takes no time to build."""
    folder = parent / "kernels"
    folder.mkdir()
    (folder / "short.cpp").write_text('extern "C" int one() { return 1; }')
    return folder


def write_compiler(folder: Path, compile_command: str) -> None:
    """A compiler that has a version, and to compile runs a command of the shell."""
    folder.mkdir()
    compiler = folder / "g++"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\n{compile_command}\n')
    compiler.chmod(0o700)


@pytest.mark.parametrize("isa", available_isas(), ids=lambda isa: isa.value)
def test_the_kernels_use_the_instructions_that_are_asked_for(isa: Isa) -> None:
    ops = load_ops("native", isa.value)
    assert f" {isa.value} " in ops.numerics()
    assert torch.equal(ops.prepare_linear(torch.eye(3), None, torch.float32)(torch.ones(1, 3)), torch.ones(1, 3))


@pytest.mark.skipif(not available_isas(), reason="no kernels for this processor")
def test_by_default_they_are_the_processors_best() -> None:
    assert f" {available_isas()[-1].value} " in load_ops("native").numerics()


def test_instructions_that_the_processor_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "available_isas", lambda: [Isa.AVX2])
    with pytest.raises(DeviceError, match="--native-isa avx512: this processor does not have these instructions"):
        load_ops("native", "avx512")


def test_torchs_kernels_take_over_on_other_processors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "available_isas", list)
    assert load_ops("native").name == "cpu"
    assert [record.message for record in caplog.records] == [
        "no kernels for this processor: the cpu backend takes over"
    ]


@pytest.mark.skipif(not available_isas(), reason="no kernels for this processor")
def test_torchs_kernels_take_over_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library.load_library.cache_clear()
    monkeypatch.setenv("PATH", "")
    try:
        assert load_ops("native").name == "cpu"
    finally:
        library.load_library.cache_clear()
    assert [record.message for record in caplog.records] == ["the kernels cannot be built: the cpu backend takes over"]


@pytest.mark.skipif(len(available_isas()) < 2, reason="this processor has one set of instructions")
def test_those_for_fewer_instructions_take_over_where_a_compiler_does_not_know_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    *_, fewer, last = available_isas()

    def build_older(isa: Isa) -> Path:
        if isa is last:
            raise BuildError("unrecognized command-line option")
        return build(isa)

    monkeypatch.setattr(library, "build", build_older)
    library.load_library.cache_clear()
    try:
        assert f" {fewer.value} " in load_ops("native").numerics()
    finally:
        library.load_library.cache_clear()
    assert [record.message for record in caplog.records] == [
        f"the kernels for {last.value} cannot be built: those for {fewer.value} take over"
    ]


@pytest.mark.skipif(Isa.AMX not in available_isas(), reason="no tiles to refuse")
def test_where_the_system_refuses_tiles_the_kernels_without_them_are_used() -> None:
    command = [sys.executable, "-m", "tests.support.kernels.without_tiles"]
    done = subprocess.run(command, env=module_environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["avx2", "avx512", "avx512_bf16", "avx512_bf16", "refused"]


@pytest.mark.skipif(not available_isas(), reason="no kernels for this processor")
def test_a_cache_that_others_can_write_to_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache" / "lockstep" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(BuildError, match="is not the user's own: others could write to it"):
        build(available_isas()[-1])


@pytest.mark.skipif(not available_isas(), reason="no kernels for this processor")
def test_the_next_build_removes_what_a_killed_one_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_compiler(tmp_path / "killing", ': > "$TMPDIR/part.s"; kill -KILL $PPID')
    environment = module_environment() | {"HOME": str(tmp_path), "PATH": str(tmp_path / "killing")}
    command = [sys.executable, "-m", "services.worker.ops.native.build"]
    killed = subprocess.run(command, env=environment, cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    folder = tmp_path / ".cache" / "lockstep" / "native"
    (left,) = folder.iterdir()
    assert (left / "part.s").exists()

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(building, "_SOURCES", write_sources(tmp_path))
    library = build(available_isas()[-1])
    assert list(folder.iterdir()) == [library]


@pytest.mark.skipif(not available_isas(), reason="no kernels for this processor")
def test_an_image_brings_kernels_that_need_neither_a_compiler_nor_a_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    isa = available_isas()[-1]
    monkeypatch.setattr(building, "_SOURCES", write_sources(tmp_path))
    monkeypatch.setattr(building, "_PREBUILT", tmp_path / "prebuilt")
    libraries = prebuild()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("HOME", "/nonexistent")
    assert build(isa) in libraries
    with pytest.raises(BuildError, match="there is no C\\+\\+ compiler"):
        build(isa, ("-DOTHER",))


def test_an_image_has_kernels_for_whatever_processor_runs_it() -> None:
    flags = every_compiler_flags()
    assert {isa.compiler_flags for isa in available_isas()} <= set(flags)
    assert len(set(flags)) == len(flags) == (5 if available_isas() else 0)
