"""What AITER's functions take, read from its sources without importing them, and whether our calls fit.

    python -m tests.support.aiter.signatures DIRECTORY

writes the table of signatures that is checked in, from a checkout of the version that its name says.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.support.system.processes import ROOT

BACKEND = ROOT / "services" / "worker" / "ops" / "aiter_ops"
NEWER_TABLE = Path(__file__).parent / "v0_1_20.json"


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function."""

    name: str
    is_required: bool


Signature = tuple[Parameter, ...]


@dataclass(frozen=True)
class Call:
    """A call of one of AITER's functions in our sources."""

    function: str
    """Its name with its module, as we import it."""
    num_positional: int
    keywords: tuple[str, ...]
    where: str

    def problems(self, signature: Signature) -> list[str]:
        """What does not fit, or is not by keyword although it is optional."""
        names = [parameter.name for parameter in signature]
        required = [parameter.name for parameter in signature if parameter.is_required]
        given = {*names[: self.num_positional], *self.keywords}
        problems = [f"no parameter {keyword}" for keyword in self.keywords if keyword not in names]
        problems += [f"no argument {name}" for name in required if name not in given]
        problems += [f"{keyword} twice" for keyword in self.keywords if keyword in names[: self.num_positional]]
        if self.num_positional > len(required):
            problems.append(f"{self.num_positional} arguments by position, of {len(required)} that are mandatory")
        return [f"{self.where}: {self.function}: {problem}" for problem in problems]


class Sources:
    """A tree of AITER's sources."""

    def __init__(self, directory: Path) -> None:
        """`directory` contains the package `aiter`."""
        self._directory = directory
        self._modules: dict[Path, ast.Module] = {}

    def signature(self, function: str) -> Signature:
        """The parameters of a function named as we import it.

        Raises:
            KeyError: there is no such function.
        """
        *path, name = function.split(".")
        if path[-1] == "tgemm":
            return self._method("tuned_gemm.py", "TunedGemm", name)
        for module in self._modules_of(tuple(path[1:])):
            if (found := self._functions(module).get(name)) is not None:
                return _parameters(found.args)
        raise KeyError(function)

    def kernel_stubs(self) -> dict[str, Signature]:
        """Every function whose kernel AITER builds, by the kernel's name."""
        stubs: dict[str, Signature] = {}
        for path in sorted((self._directory / "aiter" / "ops").glob("*.py")):
            for function in self._functions(path).values():
                for decorator in function.decorator_list:
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "compile_ops":
                        stubs[_kernel_name(decorator) or function.name] = _parameters(function.args)
        return stubs

    @cached_property
    def cpp_arguments(self) -> dict[str, list[str]]:
        """The names of each kernel's arguments in C++; an empty list where they have none."""
        text = (self._directory / "aiter_meta" / "csrc" / "include" / "rocm_ops.hpp").read_text(encoding="utf-8")
        definitions = re.split(r"\bm\.def\(", text.replace("\\\n", "\n"))[1:]
        found: dict[str, list[str]] = {}
        for definition in definitions:
            # The definitions of the next macro follow the last one of this.
            body = definition.split("#define")[0]
            name = re.match(r'\s*"(\w+)"', body)
            assert name, body[:80]
            found[name[1]] = re.findall(r'py::arg\("(\w+)"\)', body)
        return found

    def _modules_of(self, path: tuple[str, ...]) -> Iterator[Path]:
        package = self._directory / "aiter"
        if path:
            yield self._moved(package.joinpath(*path).with_suffix(".py"))
            return
        # A later import of the same name wins.
        imports = [node for node in ast.walk(self._parse(package / "__init__.py")) if isinstance(node, ast.ImportFrom)]
        for node in reversed(imports):
            if node.level == 1 and node.module and any(alias.name == "*" for alias in node.names):
                yield package.joinpath(*node.module.split(".")).with_suffix(".py")

    def _moved(self, path: Path) -> Path:
        """Newer versions have folders of Triton modules, whose old names still work."""
        if path.exists():
            return path
        for node in self._parse(path.parent / "__init__.py").body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_BACKWARD_COMPAT_MAP":
                moved: dict[str, str] = ast.literal_eval(node.value)
                return path.parent.joinpath(*moved[path.stem].split(".")).with_suffix(".py")
        raise KeyError(str(path))

    def _method(self, file: str, class_name: str, name: str) -> Signature:
        for node in self._parse(self._directory / "aiter" / file).body:
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == name:
                        return _parameters(method.args)[1:]
        raise KeyError(name)

    def _functions(self, path: Path) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in self._parse(path).body if isinstance(node, ast.FunctionDef)}

    def _parse(self, path: Path) -> ast.Module:
        if path not in self._modules:
            self._modules[path] = ast.parse(path.read_text(encoding="utf-8"))
        return self._modules[path]


def our_calls(directory: Path = BACKEND) -> list[Call]:
    """Every call of AITER in the modules of the backend."""
    return [call for path in sorted(directory.glob("*.py")) for call in calls_in(path.read_text("utf-8"), path.name)]


def calls_in(source: str, name: str) -> list[Call]:
    """Every call of AITER in a module."""
    module = ast.parse(source)
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "aiter"
        for alias in node.names
    }
    calls = []
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and (function := _imported_function(node.func, imported)) is not None:
            keywords = tuple(keyword.arg or "**" for keyword in node.keywords)
            calls.append(Call(function, len(node.args), keywords, f"{name}:{node.lineno}"))
    return calls


def read_table(path: Path = NEWER_TABLE) -> dict[str, Signature]:
    """The checked-in signatures of a newer version."""
    table: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
    return {
        function: tuple(Parameter(each.removesuffix("="), not each.endswith("=")) for each in parameters)
        for function, parameters in table.items()
    }


def write_table(sources: Sources, path: Path = NEWER_TABLE) -> None:
    """Write the signatures of the functions that we call; "=" follows an optional parameter."""
    functions = sorted({call.function for call in our_calls()})
    table = {
        function: [each.name if each.is_required else f"{each.name}=" for each in sources.signature(function)]
        for function in functions
    }
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def _imported_function(called: ast.expr, imported: dict[str, str]) -> str | None:
    """The dotted name of AITER's function that `called` is; None if it is none of AITER's."""
    if isinstance(called, ast.Name):
        return imported.get(called.id)
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id in imported:
        return f"{imported[called.value.id]}.{called.attr}"
    return None


def _parameters(arguments: ast.arguments) -> Signature:
    named = [*arguments.posonlyargs, *arguments.args]
    num_required = len(named) - len(arguments.defaults)
    return tuple(Parameter(each.arg, index < num_required) for index, each in enumerate(named))


def _kernel_name(decorator: ast.Call) -> str | None:
    """What the decorator says if the kernel has another name than its function."""
    named = {keyword.arg: keyword.value for keyword in decorator.keywords}
    value = named.get("fc_name") or (decorator.args[1] if len(decorator.args) > 1 else None)
    return str(value.value) if isinstance(value, ast.Constant) and value.value else None


if __name__ == "__main__":
    write_table(Sources(Path(sys.argv[1])))
