"""The Dockerfile's instructions, carried out without an engine: each role starts from its extra alone.

The services run as a user that owns nothing, without a home, from files that they cannot write to.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.worker.ops.native.isa import available_isas
from tests.support.deploy.dockerfile import DOCKERFILE, Build, inherited_arguments, read_stages
from tests.support.deploy.image_service import running_service
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.models.tiny_tokenizer import write_tiny_tokenizer
from tests.support.system.ports import free_port
from tests.support.system.processes import ROOT
from tests.support.system.scraping import probes, scrape

TRIVY = ROOT / ".cache" / "tools" / "trivy"
PINNED = {"PYTHON_BASE": "python@sha256:0"}
ROLES = {
    "tokenizer": "tokenizer",
    "scheduler": "scheduler",
    "worker-cpu": "worker",
    "worker-cuda": "worker",
    "worker-rocm": "worker",
}
LABELS = [
    f"org.opencontainers.image.{name}"
    for name in ("title", "description", "licenses", "version", "revision", "base.name")
]
DEVELOPMENT = {"pip", "wheel", "pytest", "grpcio-tools", "mypy", "ruff"}
# What an image must not have, since its role has no use for it. torch requires setuptools.
FORBIDDEN = {
    "tokenizer": DEVELOPMENT | {"setuptools", "torch", "triton", "kubernetes"},
    "scheduler": DEVELOPMENT | {"setuptools", "torch", "triton", "transformers", "tokenizers", "llguidance"},
    "worker-cpu": DEVELOPMENT | {"kubernetes", "transformers", "triton"},
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can enter: pytest's own are for its user alone."""
    path = Path(tempfile.mkdtemp(prefix="lockstep-images-"))
    path.chmod(0o755)
    yield path
    subprocess.run(["chmod", "-R", "u+w", str(path)], check=True)
    shutil.rmtree(path)


@pytest.fixture
def images(folder: Path) -> Build:
    """Builds below the folder. A pip, and a Python that every user can run, take the base's place."""
    programs = folder / "programs"
    programs.mkdir()
    pip = programs / "pip"
    pip.write_text(f'#!/bin/sh\nexec env -u PIP_NO_CACHE_DIR {sys.executable} -m pip "$@"\n')
    pip.chmod(0o755)
    (programs / "python").symlink_to(_python())
    return Build(folder, PINNED, programs)


def _python() -> str:
    """A Python that every user can run: where tests run as root, root's own may lie in its home."""
    own = Path(sys.base_prefix, "bin", "python3")
    if os.geteuid() != 0 or all(parent.stat().st_mode & 0o001 for parent in own.parents):
        return str(own)
    system = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    version = [system or "", "-c", "import sys; print(sys.version_info >= (3, 11))"]
    if system is None or subprocess.run(version, capture_output=True, text=True, check=False).stdout != "True\n":
        pytest.skip("no Python 3.11 that every user can run")
    return system


def packages(folder: Path) -> set[str]:
    """The names of what is installed in the image's environment."""
    infos = (folder / "opt" / "venv").glob("lib/python*/site-packages/*.dist-info")
    return {info.name.partition("-")[0].lower().replace("_", "-") for info in infos}


def test_every_role_has_an_image_that_starts_its_service_as_a_user_that_is_not_root() -> None:
    stages = read_stages()
    for name, role in ROLES.items():
        entry_point = json.loads(stages[name].arguments_of("ENTRYPOINT")[0])
        assert entry_point[1:] == ["-m", f"services.{role}"], name
        assert stages[name].arguments_of("USER") == ["65532:65532"]
        labels = [
            pair.partition("=")[0] for line in inherited_arguments(stages, name, "LABEL") for pair in shlex.split(line)
        ]
        assert sorted(labels) == sorted(LABELS), name
    assert json.loads(stages["import"].arguments_of("ENTRYPOINT")[0]) == ["lockstep"]


def test_every_base_is_given_by_its_digest(tmp_path: Path) -> None:
    bases = {stage.base for stage in read_stages().values()} - set(read_stages())
    assert bases == {"${PYTHON_BASE}", "${ROCM_BASE}"}
    first, *_ = read_stages()["build"].arguments_of("RUN")
    check = ["sh", "-c", first]
    assert subprocess.run(check, env={"PYTHON_BASE": "python:3.11"}, capture_output=True, check=False).returncode == 1
    assert subprocess.run(check, env=PINNED, capture_output=True, check=False).returncode == 0


def test_the_stubs_are_generated_as_in_the_checkout() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    version = makefile.partition("GRPCIO_TOOLS_VERSION ?= ")[2].split()[0]
    assert f"\ngrpcio-tools=={version} " in (ROOT / "deploy" / "locks" / "build.txt").read_text(encoding="utf-8")
    for folder in (ROOT, ROOT / "protos"):
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        assert f"grpcio-tools=={version}" in project["build-system"]["requires"]


def test_a_rocm_image_leaves_torch_and_triton_as_they_are() -> None:
    (install,) = [line for line in read_stages()["worker-rocm"].arguments_of("RUN") if "pip install" in line]
    assert "--no-deps -r deploy/locks/worker-rocm.txt" in install
    assert install.index("/tmp/before") < install.index("pip install") < install.index("cmp /tmp/before /tmp/after")


@pytest.mark.slow
def test_trivy_finds_nothing_grave() -> None:
    quiet = ["--quiet", "--skip-check-update", "--skip-version-check", "--disable-telemetry"]
    scan = [str(TRIVY), "config", *quiet, "--severity=HIGH,CRITICAL", "--exit-code=1", str(DOCKERFILE)]
    result = subprocess.run(scan, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@contextlib.contextmanager
def service(images: Build, name: str, *flags: str) -> Iterator[str]:
    """Build an image, check what is in it, and run its service; its management address."""
    images.build(name)
    assert packages(images.folder) & FORBIDDEN[name] == set()
    address = f"127.0.0.1:{free_port()}"
    with running_service(images, name, address, *flags):
        yield address


# It installs packages, which takes ten minutes beside busy processes.
@pytest.mark.proof
@pytest.mark.timeout(1800)
async def test_the_schedulers_image_starts(images: Build) -> None:
    flags = [f"--{name}=127.0.0.1:{free_port()}" for name in ("workers", "listen", "cell-listen")]
    with service(images, "scheduler", *flags) as address:
        assert (await probes(address))["readyz"] == "200 ok"


@pytest.mark.proof
async def test_the_tokenizers_image_starts(folder: Path, images: Build) -> None:
    model_dir = folder / "tokenizer-model"
    model_dir.mkdir()
    write_tiny_tokenizer(model_dir)
    flags = [f"--{name}=127.0.0.1:{free_port()}" for name in ("scheduler", "listen")]
    with service(images, "tokenizer", f"--model-dir={model_dir}", *flags) as address:
        assert (await probes(address))["startupz"] == "200 ok"


@pytest.mark.proof
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels are for x86-64")
@pytest.mark.timeout(1800)
async def test_the_cpu_workers_image_starts_with_kernels_and_without_a_compiler(folder: Path, images: Build) -> None:
    model_dir = write_tiny_llama(folder / "worker-model")
    # The library that writes it gives it to its user alone.
    (model_dir / "model.safetensors").chmod(0o644)
    flags = [f"--model-dir={model_dir}", f"--listen=127.0.0.1:{free_port()}", "--kv-cache-num-blocks=16"]
    with service(images, "worker-cpu", *flags) as address:
        assert (await probes(address))["readyz"] == "200 ok"
        metrics = await scrape(address)
    assert [len(files) for path, _, files in os.walk(folder / "opt" / "lockstep") if path.endswith("prebuilt")] == [4]
    [info] = [sample for metric in metrics for sample in metric.samples if sample.name == "lockstep_worker_info"]
    assert info.labels["backend"] == ("native" if available_isas() else "cpu")
