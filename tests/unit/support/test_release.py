from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.release.check import VARIABLES, find_faults
from tests.support.release.notes import notes_of

DIGEST = f"python@sha256:{'0' * 64}"
SET = dict.fromkeys(VARIABLES, "set") | {"PYTHON_BASE": DIGEST, "ROCM_BASE": DIGEST}
CHANGELOG = """# Changelog

## [Unreleased]

### Added

- Later.

## [1.2.3] - 2026-11-26

### Added

- One.

## [1.2.2] - 2026-11-25

### Fixed

- Two.
"""


def checkout(
    folder: Path, *, version: str = "1.2.3", client_version: str = "1.2.3", changelog: str = CHANGELOG
) -> Path:
    """As much of a checkout as is read."""
    (folder / "protos").mkdir()
    (folder / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n')
    (folder / "protos" / "pyproject.toml").write_text(f'[project]\nversion = "{client_version}"\n')
    (folder / "CHANGELOG.md").write_text(changelog)
    return folder


def test_a_tag_that_fits_has_no_faults(tmp_path: Path) -> None:
    assert list(find_faults("v1.2.3", checkout(tmp_path), SET)) == []


@pytest.mark.parametrize("tag", ["1.2.3", "v1.2", "v1.2.3rc1", "v1.02.3", "v1.2.3\n"])
def test_a_tag_of_another_form_is_refused(tmp_path: Path, tag: str) -> None:
    faults = list(find_faults(tag, checkout(tmp_path), SET))
    assert faults[0] == f"the tag {tag} has not the form vX.Y.Z"


def test_both_versions_are_compared_with_the_tag(tmp_path: Path) -> None:
    faults = list(find_faults("v1.2.3", checkout(tmp_path, version="1.2.2", client_version="1.3.0"), SET))
    assert faults == [
        "pyproject.toml has the version 1.2.2, not 1.2.3",
        "protos/pyproject.toml has the version 1.3.0, not 1.2.3",
    ]


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_is_not_set_is_named(tmp_path: Path, name: str) -> None:
    assert list(find_faults("v1.2.3", checkout(tmp_path), SET | {name: ""})) == [
        f"the repository's variable {name} is not set"
    ]


@pytest.mark.parametrize("image", ["python:3.11", "python@sha256:0", f"python@sha256:{'g' * 64}"])
def test_a_base_without_its_digest_is_refused(tmp_path: Path, image: str) -> None:
    assert list(find_faults("v1.2.3", checkout(tmp_path), SET | {"ROCM_BASE": image})) == [
        "the repository's variable ROCM_BASE does not name an image by its digest"
    ]


def test_a_version_that_the_changelog_does_not_have_is_refused(tmp_path: Path) -> None:
    unreleased = CHANGELOG.replace("## [1.2.3] - 2026-11-26\n", "")
    (fault,) = find_faults("v1.2.3", checkout(tmp_path, changelog=unreleased), SET)
    assert fault == "CHANGELOG.md has no heading `## [1.2.3] - YYYY-MM-DD`"


def test_notes_are_the_versions_section() -> None:
    assert notes_of("1.2.3", CHANGELOG) == "### Added\n\n- One.\n"
    assert notes_of("1.2.2", CHANGELOG) == "### Fixed\n\n- Two.\n"


def test_a_section_without_a_date_or_without_words_has_no_notes() -> None:
    with pytest.raises(ValueError, match=r"has no heading"):
        notes_of("1.2.3", "## [1.2.3]\n\n- One.\n")
    with pytest.raises(ValueError, match=r"says nothing about 1\.2\.3"):
        notes_of("1.2.3", "## [1.2.3] - 2026-11-26\n\n## [1.2.2] - 2026-11-25\n\n- Two.\n")


def test_a_dot_is_a_dot() -> None:
    with pytest.raises(ValueError, match=r"has no heading"):
        notes_of("1.2.3", "## [1x2.3] - 2026-11-26\n\n- One.\n")


@pytest.mark.process
def test_the_workflows_command_says_why_this_checkout_cannot_be_released() -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "tests.support.release.check", "v0.0.0"]
    result = subprocess.run(command, cwd=root, env={}, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert "protos/pyproject.toml has the version " in result.stderr
    assert "the repository's variable REGISTRY is not set" in result.stderr
