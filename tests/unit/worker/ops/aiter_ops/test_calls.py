"""L0: every call of AITER fits the published wheel, its C++ argument lists and a newer version, read as sources."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.aiter.signatures import BACKEND, Sources, calls_in, our_calls, read_table
from tests.support.aiter.wheel import aiter_dir

STANDINS = Path(__file__).parents[4] / "support" / "aiter" / "standins"

# Kernels whose arguments have other names in Python than in C++, or another order: `get_mla_metadata_v1` exchanges two,
# and `mha_batch_prefill` lacks one. None may be called.
MISNAMED = frozenset(
    {
        "batched_gemm_a8w8",
        "batched_gemm_a8w8_tune",
        "fmoe_fp8_blockscale_g1u1",
        "fmoe_g1u1",
        "fmoe_g1u1_tkw1",
        "get_mla_metadata_v1",
        "grouped_topk",
        "mha_batch_prefill",
        "mixed_sample_outer_exponential",
        "mla_decode_stage1_asm_fwd",
        "pa_fwd_naive",
        "random_sample",
        "random_sample_outer_exponential",
    }
)


@pytest.fixture(scope="module")
def wheel() -> Sources:
    return Sources(aiter_dir())


def test_every_call_fits_the_wheel(wheel: Sources) -> None:
    calls = our_calls()
    assert len(calls) >= 9
    assert [problem for call in calls for problem in call.problems(wheel.signature(call.function))] == []


def test_every_call_fits_the_newer_version(wheel: Sources) -> None:
    newer = read_table()
    assert {call.function for call in our_calls()} == set(newer)
    assert [problem for call in our_calls() for problem in call.problems(newer[call.function])] == []


def test_arguments_by_position_mean_the_same_in_both_versions(wheel: Sources) -> None:
    newer = read_table()
    for call in our_calls():
        here, there = (
            [each.name for each in signature[: call.num_positional]]
            for signature in (wheel.signature(call.function), newer[call.function])
        )
        assert here == there, call


def test_python_and_cpp_name_the_same_arguments(wheel: Sources) -> None:
    stubs = wheel.kernel_stubs()
    named = {name: names for name, names in wheel.cpp_arguments.items() if names and name in stubs}
    assert len(named) > 90
    different = {name for name, names in named.items() if [each.name for each in stubs[name]] != names}
    assert different == MISNAMED
    assert MISNAMED.isdisjoint(call.function.split(".")[-1] for call in our_calls())


def test_stand_ins_take_what_the_kernels_take(wheel: Sources) -> None:
    checked = 0
    for path in STANDINS.glob("module_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            expected = wheel.cpp_arguments[node.name] or [f"arg{index}" for index in range(len(node.args.args))]
            line = (ast.get_docstring(node) or "").splitlines()[0]
            assert [each.split(":")[0] for each in split_arguments(line)] == expected, node.name
            assert [each.arg for each in node.args.args] == [each.name for each in wheel.kernel_stubs()[node.name]]
            checked += 1
    assert checked == 9


def split_arguments(line: str) -> list[str]:
    """The arguments in the first line of a docstring by pybind11."""
    return line[line.index("(") + 1 : line.rindex(") ->")].split(", ")


def test_only_the_backend_imports_aiter() -> None:
    importers = {
        path
        for path in BACKEND.parent.parent.rglob("*.py")
        if re.search(r"^\s*(from|import) aiter\b", path.read_text("utf-8"), re.M)
    }
    assert {path.parent for path in importers} == {BACKEND}


MUTATIONS = {
    "an argument is missing": ("elementwise", "rmsnorm2d_fwd(rows, weight, eps)", "rmsnorm2d_fwd(rows, weight)"),
    "an optional argument goes by position": (
        "elementwise",
        "rmsnorm2d_fwd(rows, weight, eps)",
        "rmsnorm2d_fwd(rows, weight, eps, 0)",
    ),
    "a layout flag is dropped": ("elementwise", "        reuse_freqs_front_part=True,\n", ""),
    "a keyword has another name": ("attention", "kv_cache_dtype=", "cache_dtype="),
    "an argument is given twice": ("attention", "k_scale=unit_scale, v_scale", "key=unit_scale, v_scale"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_call_is_found(wheel: Sources, mutation: str) -> None:
    module, before, after = MUTATIONS[mutation]
    source = (BACKEND / f"{module}.py").read_text(encoding="utf-8")
    assert source.count(before) == 1
    calls = calls_in(source.replace(before, after), f"{module}.py")
    assert [problem for call in calls for problem in call.problems(wheel.signature(call.function))] != []
