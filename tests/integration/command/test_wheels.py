"""The wheels of both distributions, built from a checkout without stubs and installed into empty environments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import pytest

from shared.release import CLIENT_DISTRIBUTION, install_advice
from tests.support.cells.cell import Cell
from tests.support.clients.readme_samples import ADDRESS, samples
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import ROOT, program_command
from tests.support.system.wheels import build, copy_source

# They download packages, which takes minutes beside busy processes.
pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(1800)]

CONSTRAINTS = ROOT / "deploy" / "constraints-cpu.txt"
SOURCES = {".py", ".cpp", ".h", ".html", ".css", ".js"}
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
PUBLIC = {f"lockstep/v1/{name}{suffix}" for name in ("common", "scheduler", "tokenizer") for suffix in SUFFIXES}
PUBLIC.add("lockstep/v1/py.typed")


def own_environment() -> dict[str, str]:
    """The variables of this process without those that lead to the checkout, or set the services."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "PYTHON"))}


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment with one of the wheels and what it requires."""

    folder: Path

    @property
    def site(self) -> Path:
        """Where its packages are."""
        (site,) = self.folder.glob("lib/python*/site-packages")
        return site

    def run(self, program: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run one of its programs from its folder, where no checkout is."""
        command = [str(self.folder / "bin" / program), *args]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=own_environment() | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return build(source, source.with_name("wheel"))


@pytest.fixture(scope="module")
def client_wheel(source: Path) -> Path:
    return build(source / "protos", source.with_name("client-wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return install(wheel, tmp_path_factory.mktemp("installed"))


def install(package: Path, folder: Path) -> Environment:
    """Install a wheel, with what it requires, into an empty environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, "-c", str(CONSTRAINTS), str(package)], env=own_environment(), check=True)
    return Environment(folder)


@contextmanager
def serving(environment: Environment, model_dir: Path, log_path: Path) -> Iterator[Cell]:
    """A cell from the wheel's files alone; only the libraries that the extras require are those of this process."""
    variables = os.environ | {"PYTHONPATH": str(environment.site), "TMPDIR": str(log_path.parent)}
    python = [sys.executable, "-c", "import services.worker, lockstep.v1.common_pb2 as stubs; print(stubs.__file__)"]
    found = subprocess.run(python, cwd=log_path.parent, env=variables, capture_output=True, text=True, check=True)
    assert Path(found.stdout).is_relative_to(environment.site)

    address = f"127.0.0.1:{free_port()}"
    command = program_command(
        sys.executable, "-m", "services.cli", "serve", str(model_dir), f"--listen={address}", "--no-http"
    )
    with (
        log_path.open("w") as log,
        subprocess.Popen(
            command, cwd=log_path.parent, env=variables, stdout=subprocess.PIPE, stderr=log, text=True
        ) as launcher,
    ):
        try:
            cell = Cell(address, launcher, log_path)
            yield cell
            assert cell.stop(signal.SIGTERM) == 0, cell.log()
        finally:
            launcher.kill()


def test_source_archives_have_what_their_builds_need(source: Path, tmp_path: Path) -> None:
    code = [path for name in ("services", "shared") for path in (source / name).rglob("*")]
    protos = source / "protos"
    expected = {
        source: [path for path in code if path.suffix in SOURCES]
        + [protos / "build_stubs.py", *(protos / "lockstep").rglob("*.proto")],
        protos: [protos / "build_stubs.py", *(protos / "lockstep" / "v1").glob("*.proto")],
    }
    for project, files in expected.items():
        backend = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path / project.name)!r})"
        subprocess.run([sys.executable, "-c", backend], cwd=project, capture_output=True, check=True)
        (archive,) = (tmp_path / project.name).iterdir()
        with tarfile.open(archive) as tar:
            names = {name.partition("/")[2] for name in tar.getnames()}
        assert {path.relative_to(project).as_posix() for path in files} <= names, project


def test_the_wheel_has_all_modules_stubs_kernels_and_the_page(source: Path, wheel: Path) -> None:
    files = {
        path.relative_to(source).as_posix() for name in ("services", "shared") for path in (source / name).rglob("*")
    }
    expected = {name for name in files if Path(name).suffix in SOURCES}
    internal = [f"lockstep/internal/v1/{name}" for name in ("exchange", "introduction", "sampling", "worker")]
    expected |= {f"{package}/py.typed" for package in ("services", "shared")}
    expected |= PUBLIC | {f"{name}{suffix}" for name in internal for suffix in SUFFIXES}
    assert expected == {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_clients_wheel_has_the_public_stubs_alone(client_wheel: Path) -> None:
    assert {name for name in ZipFile(client_wheel).namelist() if ".dist-info/" not in name} == PUBLIC


def test_the_installed_command_says_what_it_is(installed: Environment) -> None:
    version = installed.run("lockstep", "--version")
    assert (version.returncode, version.stdout, version.stderr) == (0, "lockstep 0.1.0\n", "")
    usage = installed.run("lockstep", "--help")
    assert (usage.returncode, usage.stderr) == (0, "")
    for command in ("serve", "ranks", "chat", "generate", "rerank", "embed", "top", "pull", "import"):
        assert f"\n  {command} " in usage.stdout
        help_of_command = installed.run("lockstep", command, "--help")
        assert (help_of_command.returncode, help_of_command.stderr) == (0, ""), command


def test_a_command_names_the_extras_that_are_missing(installed: Environment, tmp_path: Path) -> None:
    serve = installed.run("lockstep", "serve", str(tmp_path))
    assert serve.returncode == 2
    assert f"{install_advice(['scheduler', 'tokenizer', 'worker-cpu'])}, with" in serve.stderr
    assert "torch" in serve.stderr
    assert "Traceback" not in serve.stderr
    imported = installed.run("lockstep", "import", "model.gguf", str(tmp_path / "model"))
    assert imported.returncode == 2
    assert install_advice(["import"]) in imported.stderr


def test_the_wheels_cell_answers_both_wheels_clients(
    installed: Environment, client_wheel: Path, tmp_path: Path
) -> None:
    client = install(client_wheel, tmp_path / "client")
    model_dir = write_tiny_llama(tmp_path / "model", changes={"num_hidden_layers": 2})
    with serving(installed, model_dir, tmp_path / "log") as cell:
        answer = installed.run("lockstep", "generate", f"--target={cell.address}", "--max-tokens=4", "hello")
        sample = client.run("python", "-c", samples()["python"].replace(ADDRESS, cell.address))
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.strip()
    assert (sample.returncode, sample.stderr) == (0, "")


def test_beside_the_stubs_alone_no_command_starts(installed: Environment, client_wheel: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*pip, str(client_wheel)], check=True)
    result = installed.run("lockstep", "--help", PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stdout) == (2, "")
    assert f"{CLIENT_DISTRIBUTION} is installed in the same environment" in result.stderr
