"""What quantisers write of a small model in every scheme that they have: it has the values that their own library reads
and computes the same, or it is refused for a reason that stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shared.model_dir import ModelDirectoryError
from tests.support.models.parity import load_paged
from tests.support.writers.jobs import run_jobs
from tests.support.writers.quantised import complete, write_plain, wrong_layers, wrong_logits

pytestmark = pytest.mark.writers


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
WRITERS = [COMPRESSED_TENSORS]
CASES = [(writer, case) for writer in WRITERS for case in writer.cases]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def written(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, str | None]]:
    """What each case wrote, and what its library said: each library is started once."""
    results: dict[tuple[str, str], tuple[Path, str | None]] = {}
    for writer in WRITERS:
        directory = tmp_path_factory.mktemp(writer.environment)
        jobs = [(directory / str(number), plain, options) for number, options in enumerate(writer.cases.values())]
        said = run_jobs(f"writers/{writer.environment}", "write.py", jobs)
        results |= {
            (writer.environment, case): (path, words)
            for case, (path, _, _), words in zip(writer.cases, jobs, said, strict=True)
        }
    return results


@pytest.mark.parametrize(("writer", "case"), CASES, ids=lambda each: getattr(each, "environment", each))
def test_a_quantised_model_has_the_librarys_values_or_is_refused_for_a_reason(
    written: dict[tuple[str, str], tuple[Path, str | None]], plain: Path, writer: Writer, case: str
) -> None:
    directory, said = written[writer.environment, case]
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
