"""Reads a Dockerfile, and carries out those of its instructions that need no container engine.

All stages share one folder, which takes the place of the root: a path of the file is one below the folder. Instructions
that change the machine itself are left out: packages of the base's distribution, and its users.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.system.processes import ROOT

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
_OF_THE_MACHINE = ("apt-get ", "useradd ")
_FOLDERS = re.compile(r"(?<![\w./])/(opt|build|cache)\b")


@dataclass
class Stage:
    """One stage: what it begins with, and its instructions in order."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def arguments_of(self, keyword: str) -> list[str]:
        """The arguments of each such instruction."""
        return [arguments for word, arguments in self.instructions if word == keyword]


def read_stages(path: Path = DOCKERFILE) -> dict[str, Stage]:
    """The stages of a Dockerfile by name; each must have one."""
    stages: dict[str, Stage] = {}
    stage = Stage("")
    for keyword, arguments in _instructions(path.read_text(encoding="utf-8")):
        if keyword == "FROM":
            base, _, name = arguments.split()
            stage = stages[name] = Stage(base)
        else:
            stage.instructions.append((keyword, arguments))
    return stages


def inherited_arguments(stages: Mapping[str, Stage], name: str, keyword: str) -> list[str]:
    """The arguments of each such instruction of a stage, after those of the stages that it begins with."""
    stage = stages.get(name)
    return [] if stage is None else inherited_arguments(stages, stage.base, keyword) + stage.arguments_of(keyword)


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for instruction in "\n".join(lines).replace("\\\n", " ").splitlines():
        keyword, _, arguments = instruction.partition(" ")
        yield keyword, " ".join(arguments.split())


class Build:
    """Images that are built below a folder."""

    def __init__(self, folder: Path, arguments: Mapping[str, str], programs: Path) -> None:
        """Prepare a build.

        Args:
            folder: Takes the place of the root.
            arguments: The build's arguments.
            programs: A folder with what the base has on its PATH: `python` and `pip`.
        """
        self.folder = folder
        self._arguments = arguments
        self._programs = programs
        self._stages = read_stages()
        self._built: set[str] = set()

    def build(self, target: str) -> None:
        """Carry out a stage, after those that it needs. Does nothing the second time.

        Raises:
            subprocess.CalledProcessError: a command failed.
        """
        if target in self._built or target not in self._stages:
            return
        self._built.add(target)
        stage = self._stages[target]
        self.build(stage.base)
        work_dir = self.folder
        inherited = [("WORKDIR", path) for path in inherited_arguments(self._stages, stage.base, "WORKDIR")]
        for keyword, arguments in inherited + stage.instructions:
            if keyword == "WORKDIR":
                work_dir = Path(self.place(arguments))
                work_dir.mkdir(parents=True, exist_ok=True)
            elif keyword == "COPY":
                self._copy(arguments, work_dir)
            elif keyword == "RUN" and not any(word in arguments for word in _OF_THE_MACHINE):
                variables = os.environ | self.environment(target) | self._values(stage)
                variables["PATH"] = os.pathsep.join([str(self._programs), os.environ["PATH"]])
                subprocess.run(["sh", "-c", self.place(arguments)], check=True, cwd=work_dir, env=variables)

    def command(self, target: str) -> list[str]:
        """The image's entry point."""
        (entry_point,) = self._stages[target].arguments_of("ENTRYPOINT")
        return list(json.loads(entry_point))

    def environment(self, target: str) -> dict[str, str]:
        """The image's variables, without PATH."""
        pairs = [pair for line in inherited_arguments(self._stages, target, "ENV") for pair in shlex.split(line)]
        variables = dict(self.place(pair).split("=", 1) for pair in pairs)
        return {name: value for name, value in variables.items() if name != "PATH"}

    def place(self, text: str) -> str:
        """The text with each path of the image as one below the folder."""
        return _FOLDERS.sub(rf"{self.folder}/\1", text)

    def _values(self, stage: Stage) -> dict[str, str]:
        declared = [word.partition("=") for line in stage.arguments_of("ARG") for word in line.split()]
        return {name: self._arguments.get(name, default) for name, _, default in declared}

    def _copy(self, arguments: str, work_dir: Path) -> None:
        words = arguments.split()
        if words[0].startswith("--from="):
            self.build(words[0].removeprefix("--from="))
            source, target = map(self.place, words[1:])
            assert source == target, "all stages share one folder"
            assert Path(source).exists(), f"no stage has made {words[1]}"
            return
        *sources, target = words
        for source in sources:
            _copy_from_context(ROOT / source, work_dir / self.place(target), into_folder=target.endswith("/"))


def _copy_from_context(source: Path, target: Path, *, into_folder: bool) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*_pb2*.py*", "prebuilt")
    target = target / source.name if into_folder else target
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)
