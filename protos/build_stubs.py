"""Generates the stubs while a distribution is built, so that none is kept in the repository.

Both distributions use it: lockstep-llm, the whole project, and lockstep-llm-client, the public stubs alone.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from grpc_tools import protoc
from setuptools.command.build_py import build_py
from setuptools.errors import ExecError

_ROOT = Path(__file__).parent


class BuildStubs(build_py):
    """Builds a distribution's packages, with the stubs of those that have .proto files.

    An editable install gets them beside the .proto files, where `make protos` writes them too.
    """

    def run(self) -> None:
        """Copy the modules and generate the stubs.

        Raises:
            ExecError: protoc failed; what it says is on stderr.
        """
        super().run()
        folders = [_ROOT.joinpath(*package.split(".")) for package in self.packages or ()]
        if files := sorted(str(path) for folder in folders for path in folder.glob("*.proto")):
            _generate(files, _ROOT if self.editable_mode else Path(self.build_lib))


def _generate(files: list[str], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    # Messages of google/rpc are in another package, Google's own in the generator's.
    includes = [_ROOT, _folder_of("google.rpc").parents[1], _folder_of("grpc_tools") / "_proto"]
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", *(f"-I{folder}" for folder in includes), *outputs, *files]) != 0:
        raise ExecError("the stubs cannot be generated")


def _folder_of(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])
