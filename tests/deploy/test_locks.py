"""The locks that images and releases are installed from: they fit the requirements and the constraints, with hashes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.deploy.dockerfile import DOCKERFILE, read_stages
from tests.support.system.processes import ROOT

LOCKS = ROOT / "deploy" / "locks"
# The tokenizer's image can export spans.
MORE_EXTRAS = {"tokenizer": ("tracing",)}
ROLES = ("tokenizer", "scheduler", "worker-cpu", "worker-cuda", "worker-rocm", "import")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins_of(path: Path) -> dict[str, list[Requirement]]:
    """The requirements of a lock or of constraints by name; one name may have several, for different Pythons."""
    pins: dict[str, list[Requirement]] = {}
    for line in re.findall(r"^\w.*?(?= \\$|$)", path.read_text(encoding="utf-8"), re.MULTILINE):
        requirement = Requirement(line)
        pins.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return pins


def version_of(pin: Requirement) -> str:
    (specifier,) = pin.specifier
    assert specifier.operator == "=="
    return specifier.version


def required_by(extra: str) -> Iterator[Requirement]:
    """What the distribution requires with an extra, and by the extras that this one names."""
    yield from map(Requirement, PROJECT["dependencies"])
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        if requirement.name == PROJECT["name"]:
            for other in requirement.extras:
                yield from required_by(other)
        else:
            yield requirement


@pytest.mark.parametrize("role", ROLES)
def test_a_roles_lock_has_what_its_extra_requires(role: str) -> None:
    pins = pins_of(LOCKS / f"{role}.txt")
    extras = (role, *MORE_EXTRAS.get(role, ()))
    for requirement in (each for extra in extras for each in required_by(extra)):
        if requirement.name == "torch" and role != "worker-cuda":
            continue
        found = pins[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(version_of(pin)) for pin in found), requirement


@pytest.mark.parametrize("path", sorted(LOCKS.glob("*.txt")), ids=lambda path: path.stem)
def test_every_pin_has_hashes_and_is_that_of_the_constraints(path: Path) -> None:
    constraints = pins_of(ROOT / "deploy" / "constraints-cpu.txt")
    for name, pins in pins_of(path).items():
        for pin in pins:
            assert version_of(pin) in {version_of(other) for other in constraints.get(name, [pin])}, name
    blocks = re.split(r"^(?=\w)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    for block in blocks:
        first, *hashes = block.splitlines()
        assert re.fullmatch(r"\S+==\S+( ; .+)? \\", first), first
        assert hashes, first
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in hashes), first


@pytest.mark.parametrize("role", ["worker-cpu", "worker-rocm", "import"])
def test_only_cudas_lock_has_torch(role: str) -> None:
    """The hashes of its other builds are not the public index's."""
    names = set(pins_of(LOCKS / f"{role}.txt"))
    assert not {name for name in names if name.startswith(("torch", "triton", "nvidia", "cuda"))}
    assert {"torch", "triton", "nvidia-nccl-cu13"} <= set(pins_of(LOCKS / "worker-cuda.txt"))


def test_the_dockerfile_installs_nothing_from_an_index_without_hashes_but_torch() -> None:
    stages = read_stages(DOCKERFILE)
    commands = [
        command
        for stage in stages.values()
        for line in stage.arguments_of("RUN")
        for command in line.split(" && ")
        if re.search(r"\bpip\b.*\binstall\b", command) and "uninstall" not in command
    ]
    with_hashes = [command for command in commands if "--require-hashes --no-deps -r deploy/locks/" in command]
    others = [command for command in commands if command not in with_hashes]
    assert {Path(command.split()[-1]).stem for command in with_hashes} == {*ROLES, "build"}
    assert [command for command in others if not command.endswith(" --no-deps dist/*.whl")] == [
        "pip --python /opt/venv/bin/python install --no-deps ${TORCH_ARGS} -c deploy/constraints-cpu.txt torch"
    ]


def test_what_builds_a_release_is_what_the_projects_ask_for() -> None:
    build = pins_of(LOCKS / "build.txt")
    for folder in (ROOT, ROOT / "protos"):
        system = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
        for requirement in map(Requirement, system["requires"]):
            (pin,) = build[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version_of(pin)), requirement
    release = pins_of(LOCKS / "release.txt")
    assert {name: [version_of(pin) for pin in release[name]] for name in build} == {
        name: [version_of(pin) for pin in pins] for name, pins in build.items()
    }
