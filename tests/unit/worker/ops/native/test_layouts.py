"""What Python packs for a kernel is laid out as the structure that the kernel reads."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from struct import Struct, calcsize

import pytest
import torch

from services.worker.ops import DrawRows, native

PACKAGE = Path(native.__file__).parent
SOURCES = "\n".join(path.read_text("utf-8") for path in sorted((PACKAGE / "kernels").iterdir()))

# The structure in C++ that each layout in Python is of.
LAYOUT_TO_STRUCTURE = {
    "attention._plan_args": "PlanArgs",
    "attention._step": "Step",
    "attention._attention_args": "AttentionArgs",
    "draw._draw": "DrawArgs",
    "elementwise._rms_norm": "RmsNormArgs",
    "elementwise._add_rms_norm": "AddRmsNormArgs",
    "elementwise._layer_norm": "LayerNormArgs",
    "elementwise._act_and_mul": "ActAndMulArgs",
    "elementwise._scale": "ScaleArgs",
    "elementwise._take_columns": "TakeColumnsArgs",
    "elementwise._greedy_sample": "GreedySampleArgs",
    "experts._experts": "ExpertsCall",
    "experts._expert": "Expert",
    "heads._heads": "HeadsArgs",
    "heads._rows": "RowsArgs",
    "packed._matrix": "Matrix",
    "products._linear": "LinearCall",
    "products._rows": "RowsCall",
    "products._take": "TakeCall",
    "recurrent._causal_conv": "ConvArgs",
    "recurrent._delta_rule": "DeltaArgs",
    "recurrent._gated_norm": "GatedNormArgs",
    "recurrent._mul_sigmoid": "MulSigmoidArgs",
}


def layouts() -> dict[str, str]:
    """The format of each layout, by its module and name."""
    found = {}
    for module in iter_modules([str(PACKAGE)]):
        for name, value in vars(import_module(f"{native.__name__}.{module.name}")).items():
            owner = getattr(value, "__self__", value)
            if isinstance(owner, Struct):
                found[f"{module.name}.{name}"] = owner.format
    return found


def field_types(structure: str) -> str:
    """The types of a structure's fields in C++, as `struct` writes them: every one has eight bytes."""
    match = re.search(rf"^struct {structure} {{\n(.*?)^}};", SOURCES, re.MULTILINE | re.DOTALL)
    assert match is not None, structure
    types = ""
    for line in re.sub(r"//.*", "", match[1]).split(";"):
        declaration = " ".join(line.split())
        if not declaration or "(" in declaration or declaration == "}":
            continue
        kind, fields = declaration.removeprefix("const ").split(" ", 1)
        for field in fields.split(","):
            types += "P" if kind.endswith("*") or field.strip().startswith("*") else types_of(kind)
    return types


def types_of(kind: str) -> str:
    """The letters of a type that is no pointer."""
    if re.search(rf"^struct {kind} {{", SOURCES, re.MULTILINE):
        return field_types(kind)
    if kind not in {"int64_t", "double"}:
        assert re.search(rf"enum (class )?{kind} : int64_t\b", SOURCES), kind
    return "d" if kind == "double" else "q"


def test_every_layout_is_compared() -> None:
    assert layouts().keys() == LAYOUT_TO_STRUCTURE.keys()


@pytest.mark.parametrize("layout", LAYOUT_TO_STRUCTURE)
def test_a_layout_is_that_of_its_structure(layout: str) -> None:
    packed = re.sub(r"(\d+)(\w)", lambda match: int(match[1]) * match[2], layouts()[layout].replace(" ", ""))
    assert packed == field_types(LAYOUT_TO_STRUCTURE[layout])
    assert calcsize(layouts()[layout]) == 8 * len(packed)


def test_rows_to_draw_have_the_same_columns_in_python_and_cpp() -> None:
    match = re.search(r"^struct DrawRows {\n(.*?)^};", SOURCES, re.MULTILINE | re.DOTALL)
    assert match is not None
    columns = re.findall(r"const (\w+)\* (\w+);", match[1])
    names = {"float": torch.float32, "int32_t": torch.int32, "int64_t": torch.int64}
    assert [(name, names[kind]) for kind, name in columns] == list(DrawRows.dtypes().items())
