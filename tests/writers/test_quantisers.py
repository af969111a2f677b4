"""What quantisers write of a small model in every scheme that they have: it has the values that their own library reads
and computes the same, or it is refused for a reason given here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shared.model_files.model_dir import ModelDirectoryError
from tests.support.models.parity import load_paged
from tests.support.writers.jobs import run_jobs
from tests.support.writers.quantised import complete, write_plain, wrong_layers, wrong_logits

pytestmark = pytest.mark.writers

Written = tuple[Path, str | None]


@dataclass(frozen=True)
class Writer:
    """A quantiser: its environment in `tests/writers`, what it is asked to do, and what we refuse of what it writes."""

    environment: str
    cases: Mapping[str, Any]
    refused: Mapping[str, str] = field(default_factory=dict)
    """By case, a part of what we say."""
    unwritten: Mapping[str, str] = field(default_factory=dict)
    """By case, a part of what the library says."""


def _linear(weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": dict(weights)}},
        "ignore": ["lm_head"],
        **more,
    }


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_INT8 = {"num_bits": 8, "type": "int"}
_FP8 = {"num_bits": 8, "type": "float"}
# All of the library's.
_PRESETS = (
    *("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "INT8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"),
    *("NVFP4A16", "NVFP4", "MXFP4A16", "MXFP4", "MXFP4XFP8", "MXFP6A16", "MXFP6A8", "MXFP8A16", "MXFP8"),
    *("W2A4", "W2A8", "W2A16", "W3A4", "W3A8", "W3A16", "W4A4", "W4A8", "W4AFP8", "W5A8", "W5A16", "W6A8", "W6A16"),
    *("W7A8", "W7A16"),
)
COMPRESSED_TENSORS = Writer(
    "compressed_tensors",
    {
        **{name: {"config_groups": {name: ["Linear"]}, "ignore": ["lm_head"]} for name in _PRESETS},
        "int4, in activation order": _linear({**_INT4, "actorder": "group"}),
        "int4, in activation order of weights": _linear({**_INT4, "actorder": "weight"}),
        "int4, asymmetric channels": _linear({**_INT4, "strategy": "channel", "group_size": None, "symmetric": False}),
        "int8, asymmetric groups": _linear({**_INT8, "strategy": "group", "group_size": 64, "symmetric": False}),
        "int8, asymmetric channels": _linear({**_INT8, "strategy": "channel", "symmetric": False}),
        "int8, tensor": _linear({**_INT8, "strategy": "tensor"}),
        "fp8, channels": _linear({**_FP8, "strategy": "channel"}),
        "fp8, blocks of 64 by 128": _linear({**_FP8, "strategy": "block", "block_structure": [64, 128]}),
        "a cache in fp8": _linear(_INT4, kv_cache_scheme={**_FP8, "strategy": "tensor", "symmetric": True}),
        "two schemes": {
            "config_groups": {
                "group_0": {"targets": ["re:.*self_attn.*"], "weights": {**_FP8, "strategy": "channel"}},
                "group_1": {"targets": ["re:.*mlp.*"], "weights": _INT4},
            },
            "ignore": ["lm_head", "re:.*layers.0.*up_proj"],
        },
        "the head too": {"config_groups": {"W8A16": ["Linear"]}},
    },
    refused={
        **dict.fromkeys(
            ("W2A16", "W3A16", "W5A16", "W6A16", "W7A16"), "'pack-quantized' with symmetric int weights of [23567] bits"
        ),
        **dict.fromkeys(("MXFP6A16", "MXFP6A8"), "'mxfp6-pack-quantized'"),
        **dict.fromkeys(("MXFP8A16", "MXFP8"), "'mxfp8-quantized'"),
    },
    # Checkpoints of older releases have it, and are read.
    unwritten={"int4, in activation order": "actorder='group' has been removed"},
)
_GROUPS = {"ch_axis": -1, "group_size": 32}
_ROWS = {"ch_axis": 0}
AMD_QUARK = Writer(
    "amd_quark",
    {
        name: {"weight": [spec, arguments], **more}
        for name, spec, arguments, more in (
            ("fp8, tensor", "FP8E4M3PerTensorSpec", {}, {}),
            ("fp8, channels", "FP8E4M3PerChannelSpec", _ROWS, {}),
            ("fp8, groups", "FP8E4M3PerGroupSpec", {**_GROUPS, "is_dynamic": False}, {}),
            ("fp8 e5m2, tensor", "FP8E5M2PerTensorSpec", {}, {}),
            ("int8, tensor", "Int8PerTensorSpec", {}, {}),
            ("int8, channels", "Int8PerChannelSpec", _ROWS, {}),
            ("int8, symmetric channels", "Int8PerChannelSpec", {**_ROWS, "symmetric": True}, {}),
            ("int4, groups", "Int4PerGroupSpec", _GROUPS, {}),
            ("int4, in order", "Int4PerGroupSpec", _GROUPS, {"pack_method": "order"}),
            ("uint4, groups", "Uint4PerGroupSpec", _GROUPS, {}),
            ("uint4, in order", "Uint4PerGroupSpec", _GROUPS, {"pack_method": "order"}),
            ("mxfp4", "OCP_MXFP4Spec", {"ch_axis": -1, "is_dynamic": False}, {}),
            ("mxfp6", "OCP_MXFP6E2M3Spec", {"ch_axis": -1, "is_dynamic": False}, {}),
            ("mxfp8", "OCP_MXFP8E4M3Spec", {"ch_axis": -1, "is_dynamic": False}, {}),
            ("int4, channels", "Int4PerChannelSpec", _ROWS, {}),
            ("int3, groups", "Int3PerGroupSpec", _GROUPS, {}),
            ("uint8, channels", "Uint8PerChannelSpec", _ROWS, {}),
        )
    },
    refused={
        "mxfp6": "dtype 'fp6_e2m3', qscheme 'per_group'",
        "int4, channels": "dtype 'int4', qscheme 'per_channel'",
        "uint8, channels": "dtype 'uint8', qscheme 'per_channel'",
    },
    unwritten={
        **dict.fromkeys(("fp8, groups", "mxfp8"), "Unsupported QuantSchema: per_group for quant_dtype: fp8_e4m3"),
        # Rows of 384 are no whole number of its words.
        "int3, groups": "is invalid for input of size",
    },
)
TRANSFORMERS_FP8 = Writer(
    "transformers_fp8",
    {
        "blocks of 128 by 128": {},
        "blocks of 64 by 128": {"weight_block_size": [64, 128]},
        "blocks of 128, powers of two": {"scale_fmt": "ue8m0"},
        "groups of 32": {"weight_block_size": [1, 32]},
        "tensor": {"weight_block_size": None},
    },
)
WRITERS = [COMPRESSED_TENSORS, AMD_QUARK, TRANSFORMERS_FP8]
CASES = [(writer, case) for writer in WRITERS for case in writer.cases]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def write(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Writer], dict[str, Written]]:
    """Gives, by case, the directory that a library wrote and what it said; each library is started once."""
    known: dict[str, dict[str, Written]] = {}

    def write(writer: Writer) -> dict[str, Written]:
        if writer.environment not in known:
            directory = tmp_path_factory.mktemp(writer.environment)
            jobs = [(directory / str(number), plain, options) for number, options in enumerate(writer.cases.values())]
            said = run_jobs(f"writers/{writer.environment}", "write.py", jobs)
            places = (path for path, _, _ in jobs)
            known[writer.environment] = dict(zip(writer.cases, zip(places, said, strict=True), strict=True))
        return known[writer.environment]

    return write


@pytest.mark.parametrize(("writer", "case"), CASES, ids=lambda each: getattr(each, "environment", each))
def test_a_quantised_model_has_the_librarys_values_or_is_refused_for_a_reason(
    write: Callable[[Writer], dict[str, Written]], plain: Path, writer: Writer, case: str
) -> None:
    directory, said = write(writer)[case]
    if case in writer.unwritten:
        assert writer.unwritten[case] in (said or "")
        return
    assert said is None
    complete(directory)
    if case in writer.refused:
        with pytest.raises(ModelDirectoryError, match=writer.refused[case]):
            load_paged(directory, "cpu")
        return
    assert wrong_layers(directory) == []
    assert wrong_logits(directory, plain) == []
