"""A command whose extra is missing names it; the extras are those of pyproject.toml."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from services.cli.commands import run
from services.cli.extras import EXTRA_TO_MODULES, ROLE_TO_EXTRA, missing_packages
from services.cli.processes.service_command import ROLES
from shared.release import CLIENT_DISTRIBUTION, DISTRIBUTION
from tests.support.system.processes import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENT_TO_MODULE = {"pyyaml": "yaml"}
REQUIREMENT = re.compile(r"([\w-]+)(?:\[([\w,-]+)\])?")


def modules_of(extra: str) -> set[str]:
    """The modules of an extra and of those that it includes."""
    modules: set[str] = set()
    for requirement in PROJECT["optional-dependencies"][extra]:
        match = REQUIREMENT.match(requirement)
        assert match is not None
        if match[1] == DISTRIBUTION:
            modules.update(*map(modules_of, match[2].split(",")))
        else:
            modules.add(REQUIREMENT_TO_MODULE.get(match[1], match[1].replace("-", "_")))
    return modules


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Let modules be as if they were not installed."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    for name in modules:
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_the_extras_are_those_of_the_distribution() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    required = {extra: modules_of(extra) for extra in EXTRA_TO_MODULES}
    required["tokenizer"] -= required["pull"] | required["http"]
    required["scheduler"] -= required["config"]
    assert {extra: set(names) for extra, names in EXTRA_TO_MODULES.items()} == required
    assert {*ROLE_TO_EXTRA} == {*ROLES}
    assert {*ROLE_TO_EXTRA.values()} <= {*EXTRA_TO_MODULES}


def test_the_stubs_alone_have_the_same_release() -> None:
    client = tomllib.loads((ROOT / "protos" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (client["name"], client["version"]) == (CLIENT_DISTRIBUTION, PROJECT["version"])
    assert {*client["dependencies"]} <= {*PROJECT["dependencies"]}


def test_what_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "xxhash", "kubernetes", "prompt_toolkit", "shtab")
    assert missing_packages("chat", ["chat"]) == (
        "`lockstep chat` needs prompt_toolkit, shtab: pip install '.[chat]' in a checkout of Lockstep"
    )
    # torch would come for CUDA.
    hide(monkeypatch, "torch")
    said = missing_packages("serve", ["worker-cpu"])
    assert said is not None
    assert " --extra-index-url https://download.pytorch.org/whl/cpu '.[worker-cpu]' " in said


def test_nothing_is_missing_where_all_is_installed() -> None:
    assert missing_packages("serve", ROLE_TO_EXTRA.values()) is None


def test_beside_the_stubs_alone_no_command_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = tmp_path / "lockstep_llm_client-9.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {CLIENT_DISTRIBUTION}\nVersion: 9.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert run(["--version"]) == 2
    assert f"{CLIENT_DISTRIBUTION} is installed in the same environment as {DISTRIBUTION}" in capsys.readouterr().err
